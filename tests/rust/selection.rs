//! What a load wants of a checkpoint, by name.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::selection::{IndexRegions, Selection, Slices};
use fst::error::Kind;
use safetensors::tensor::Dtype;
use std::sync::Arc;
use tempfile::TempDir;

struct Trial {
    checkpoint: Arc<Checkpoint>,
    _directory: TempDir,
}

/// Two files, with `b` before `a` in the second.
fn trial() -> Trial {
    let directory = TempDir::new().unwrap();
    let tensor = |name, dtype, shape: [usize; 2], bytes| (name, dtype, shape.to_vec(), files::pattern(3, bytes));
    let first = files::written(&directory, "1.safetensors", &[tensor("x", Dtype::U8, [4, 6], 24)]);
    let others = [tensor("a", Dtype::U8, [2, 2], 4), tensor("b", Dtype::F32, [3, 5], 60)];
    let second = files::written(&directory, "2.safetensors", &others);
    Trial { checkpoint: Arc::new(Checkpoint::open(&[first, second]).unwrap()), _directory: directory }
}

fn strings<const COUNT: usize>(names: [&str; COUNT]) -> [String; COUNT] {
    names.map(str::to_owned)
}

fn names(selection: &Selection) -> Vec<&str> {
    selection.regions().iter().map(|wanted| &*wanted.name).collect()
}

#[test]
fn all_tensors_come_in_the_order_of_the_files() {
    let trial = trial();
    let all = Selection::all(&trial.checkpoint).unwrap();
    assert_eq!(names(&all), ["x", "b", "a"]);
    assert_eq!(all.in_file_order(), [0, 1, 2]);
    assert_eq!(all.regions().iter().map(|wanted| wanted.source).collect::<Vec<_>>(), [0, 1, 1]);
}

#[test]
fn named_tensors_come_as_they_are_named() {
    let trial = trial();
    let named = Selection::named(&trial.checkpoint, &strings(["a", "x", "b", "a"])).unwrap();
    assert_eq!(names(&named), ["a", "x", "b", "a"]);
    assert_eq!(named.in_file_order(), [1, 2, 0, 3]);
    let error = Selection::named(&trial.checkpoint, &strings(["a", "c"])).err().unwrap();
    assert_eq!(error.kind(), Kind::TensorNotFound);
}

#[test]
fn there_is_one_slice_for_each_name() {
    let trial = trial();
    let names = strings(["x", "b"]);
    let slices = Slices { dims: &[0, -1], starts: &[1, 4], lengths: &[2, 1] };
    let selection = Selection::slices(&trial.checkpoint, &names, slices).unwrap();
    let shapes: Vec<_> = selection.regions().iter().map(|wanted| wanted.shape.clone()).collect();
    assert_eq!(shapes, [[2, 6], [3, 1]]);
    for wrong in
        [Slices { dims: &[0], ..slices }, Slices { starts: &[0; 3], ..slices }, Slices { lengths: &[], ..slices }]
    {
        let error = Selection::slices(&trial.checkpoint, &names, wrong).err().unwrap();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        assert!(error.to_string().contains("2 names"), "{error}");
    }
}

#[test]
fn there_is_one_span_for_each_dimension() {
    let trial = trial();
    let names = strings(["x", "b"]);
    let boxes = IndexRegions { starts: &[1, 0, 0, 4], lengths: &[2, 3, 2, 1], steps: &[1, 2, 2, 1] };
    let selection = Selection::index_regions(&trial.checkpoint, &names, boxes).unwrap();
    let shapes: Vec<_> = selection.regions().iter().map(|wanted| wanted.shape.clone()).collect();
    assert_eq!(shapes, [[2, 3], [2, 1]]);
    for wrong in [
        IndexRegions { starts: &[0; 3], ..boxes },
        IndexRegions { lengths: &[1; 5], ..boxes },
        IndexRegions { steps: &[], ..boxes },
        IndexRegions { starts: &[0; 5], lengths: &[1; 5], steps: &[1; 5] },
        IndexRegions { starts: &[0, 0, 0, -1], ..boxes },
        IndexRegions { steps: &[1, 1, 1, -1], ..boxes },
    ] {
        let error = Selection::index_regions(&trial.checkpoint, &names, wrong).err().unwrap();
        assert_eq!(error.kind(), Kind::InvalidArgument, "{wrong:?}");
    }
}

#[test]
fn errors_name_the_file() {
    let trial = trial();
    let wrong = Slices { dims: &[2], starts: &[0], lengths: &[1] };
    let error = Selection::slices(&trial.checkpoint, &strings(["b"]), wrong).err().unwrap();
    assert!(error.to_string().contains("2.safetensors: tensor \"b\""), "{error}");
}
