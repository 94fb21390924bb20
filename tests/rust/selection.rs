//! Selections of requested regions by name.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::selection::{IndexRegions, Selection};
use fst::error::Kind;
use safetensors::tensor::Dtype;
use std::sync::Arc;
use tempfile::TempDir;

/// Opens a checkpoint of two files, the second of which stores `b` before `a`.
fn checkpoint() -> Arc<Checkpoint> {
    let directory = TempDir::new().unwrap();
    let tensor = |name, dtype, shape: [usize; 2], bytes| (name, dtype, shape.to_vec(), files::pattern(3, bytes));
    let first = files::written(&directory, "1.safetensors", &[tensor("x", Dtype::U8, [4, 6], 24)]);
    let others = [tensor("a", Dtype::U8, [2, 2], 4), tensor("b", Dtype::F32, [3, 5], 60)];
    let second = files::written(&directory, "2.safetensors", &others);
    Arc::new(Checkpoint::open(&[first, second]).unwrap())
}

fn strings<const COUNT: usize>(names: [&str; COUNT]) -> [String; COUNT] {
    names.map(str::to_owned)
}

#[test]
fn index_ranges_must_match_the_dimensions() {
    let checkpoint = checkpoint();
    let names = strings(["x", "b"]);
    let index_regions = IndexRegions { starts: &[1, 0, 0, 4], lengths: &[2, 3, 2, 1], steps: &[1, 2, 2, 1] };
    let selection = Selection::index_regions(&checkpoint, &names, index_regions).unwrap();
    let shapes: Vec<_> = selection.regions().iter().map(|region| region.shape.clone()).collect();
    assert_eq!(shapes, [[2, 3], [2, 1]]);
    for wrong in [
        IndexRegions { starts: &[0; 3], ..index_regions },
        IndexRegions { lengths: &[1; 5], ..index_regions },
        IndexRegions { steps: &[], ..index_regions },
        IndexRegions { starts: &[0; 5], lengths: &[1; 5], steps: &[1; 5] },
        IndexRegions { starts: &[0, 0, 0, -1], ..index_regions },
        IndexRegions { steps: &[1, 1, 1, -1], ..index_regions },
    ] {
        let error = Selection::index_regions(&checkpoint, &names, wrong).err().unwrap();
        assert_eq!(error.kind(), Kind::InvalidArgument, "{wrong:?}");
    }
    for start in [5, -1] {
        let wrong = IndexRegions { starts: &[0, start], lengths: &[1; 2], steps: &[1; 2] };
        let error = Selection::index_regions(&checkpoint, &strings(["b"]), wrong).err().unwrap();
        assert!(error.to_string().contains("2.safetensors: tensor \"b\""), "{error}");
    }
}
