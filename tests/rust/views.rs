//! Which tensors are used where they lie in a mapped file, and which are read.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::dtype::Dtype;
use fst::load::views::{Mappings, Views};
use fst::options::{Options, ReaderChoice};
use tempfile::TempDir;

/// Three tensors whose data begin at a multiple of eight, but for the last, which is one byte behind.
const JSON: &str = r#"{"f":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},"none":{"dtype":"F32","shape":[0],"data_offsets":[32,32]},"b":{"dtype":"U8","shape":[3],"data_offsets":[32,35]},"odd":{"dtype":"F32","shape":[2],"data_offsets":[35,43]}}"#;

struct Trial {
    checkpoint: Checkpoint,
    data: Vec<u8>,
    /// Where in the file the data begin.
    begin: u64,
    _directory: TempDir,
}

impl Trial {
    fn new() -> Trial {
        let directory = TempDir::new().unwrap();
        let json = format!("{JSON:<width$}", width = JSON.len().next_multiple_of(8));
        let data = files::pattern(6, 43);
        let path = files::raw(&directory, "x.safetensors", &json, &data);
        let checkpoint = Checkpoint::open(&[path]).unwrap();
        Trial { checkpoint, data, begin: 8 + json.len() as u64, _directory: directory }
    }

    fn whole(&self, name: &str) -> TensorRegion {
        let (source, entry) = self.checkpoint.find(name).unwrap();
        TensorRegion::whole(source, entry).unwrap()
    }

    fn slice(&self, name: &str, dim: i64, start: i64, length: i64) -> TensorRegion {
        let (source, entry) = self.checkpoint.find(name).unwrap();
        TensorRegion::slice(source, entry, dim, start, length).unwrap()
    }

    fn views(&self, wanted: &[TensorRegion], dtypes: &[Option<Dtype>], options: &Options) -> Views {
        Views::open(&self.checkpoint, &Mappings::default(), wanted, dtypes, options).unwrap()
    }

    /// Which of these, wanted as they are, are views; each of those holds the right bytes.
    fn viewed(&self, wanted: &[TensorRegion]) -> Vec<bool> {
        let dtypes: Vec<_> = wanted.iter().map(|wanted| Some(wanted.dtype)).collect();
        let views = self.views(wanted, &dtypes, &Options::default());
        let check = |(tensor, wanted): (usize, &TensorRegion)| {
            let Some(address) = views.address(tensor) else { return false };
            let _hold = views.guard(tensor).unwrap();
            let range = wanted.contiguous().unwrap();
            let length = (range.end - range.start) as usize;
            let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
            // SAFETY: the view is mapped for as long as `views` lives.
            let found = unsafe { std::slice::from_raw_parts(pointer, length) };
            assert_eq!(found, &self.data[(range.start - self.begin) as usize..][..length]);
            true
        };
        wanted.iter().enumerate().map(check).collect()
    }
}

#[test]
fn what_lies_aligned_and_in_one_piece_is_a_view() {
    let trial = Trial::new();
    let wanted = ["f", "none", "b", "odd"].map(|name| trial.whole(name));
    // Nothing of an empty tensor is anywhere, and a float that begins at an odd byte cannot be used there.
    assert_eq!(trial.viewed(&wanted), [true, false, true, false]);
}

#[test]
fn rows_are_views_and_columns_are_not() {
    let trial = Trial::new();
    assert_eq!(trial.viewed(&[trial.slice("f", 0, 1, 2)]), [true]);
    assert_eq!(trial.viewed(&[trial.slice("f", 1, 0, 1)]), [false]);
    assert_eq!(trial.viewed(&[trial.slice("f", 1, 0, 2)]), [true]);
    assert_eq!(trial.viewed(&[trial.slice("f", 0, 1, 0)]), [false]);
}

#[test]
fn bytes_that_are_wanted_twice_are_a_view_once() {
    let trial = Trial::new();
    assert_eq!(trial.viewed(&[trial.whole("f"), trial.whole("b"), trial.whole("f")]), [true, true, false]);
    // Parts that share a row, in any order, and one that does not.
    let parts = [trial.slice("f", 0, 2, 2), trial.slice("f", 0, 0, 1), trial.slice("f", 0, 1, 2)];
    let viewed = trial.viewed(&parts);
    assert_eq!(viewed, [false, true, true]);
}

#[test]
fn another_dtype_is_no_view() {
    let trial = Trial::new();
    let wanted = ["f", "b"].map(|name| trial.whole(name));
    let views = trial.views(&wanted, &[Some(Dtype::F16), Some(Dtype::U8)], &Options::default());
    assert_eq!(views.address(0), None);
    assert!(views.address(1).is_some());
    assert_eq!(trial.views(&wanted, &[None, None], &Options::default()).address(1), None);
}

#[test]
fn where_nothing_is_mapped_nothing_is_a_view() {
    let trial = Trial::new();
    let wanted = [trial.whole("f")];
    let dtypes = [Some(Dtype::F32)];
    for options in [
        Options { reader: ReaderChoice::Pread, ..Options::default() },
        Options { reader: ReaderChoice::Uring, ..Options::default() },
        Options { drop_cache: true, ..Options::default() },
        Options { reader: ReaderChoice::Mmap, drop_cache: true, ..Options::default() },
    ] {
        let views = trial.views(&wanted, &dtypes, &options);
        assert_eq!(views.address(0), None, "{options:?}");
        assert!(views.guard(0).is_err());
    }
    // A file none of whose tensors can be a view is not mapped either.
    assert!(trial.views(&[trial.whole("odd")], &dtypes, &Options::default()).guard(0).is_err());
}

fn bytes_at(address: u64, length: usize) -> &'static mut [u8] {
    // SAFETY: the tests look at views only while they hold them.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), length) }
}

#[test]
fn loads_share_a_mapping_but_no_bytes() {
    let trial = Trial::new();
    let mappings = Mappings::default();
    let open = |name: &str| {
        let dtypes = [Some(trial.whole(name).dtype)];
        Views::open(&trial.checkpoint, &mappings, &[trial.whole(name)], &dtypes, &Options::default()).unwrap()
    };
    let (first, other, again) = (open("f"), open("b"), open("f"));
    let distance = other.address(0).unwrap() - first.address(0).unwrap();
    assert_eq!(distance, 32, "two tensors of one mapping lie as they do in the file");
    bytes_at(first.address(0).unwrap(), 32).fill(7);
    assert_eq!(bytes_at(again.address(0).unwrap(), 32), &trial.data[..32]);
    // Also where what had them is gone.
    drop((first, again));
    assert_eq!(bytes_at(open("f").address(0).unwrap(), 32), &trial.data[..32]);
}

/// Three tensors, of which the middle one has whole pages of its own.
#[test]
fn a_view_that_goes_takes_its_pages_along_and_no_others() {
    let directory = TempDir::new().unwrap();
    let sizes = [100, 5 * files::PAGE_BYTES, 100];
    let tensors = ["a", "b", "c"].iter().zip(sizes).enumerate();
    let tensors: Vec<_> = tensors
        .map(|(seed, (name, size))| (*name, safetensors::Dtype::U8, vec![size], files::pattern(seed, size)))
        .collect();
    let path = files::written(&directory, "x.safetensors", &tensors);
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    let wanted: Vec<_> =
        checkpoint.entries().map(|(source, entry)| TensorRegion::whole(source, entry).unwrap()).collect();
    let dtypes = vec![Some(Dtype::U8); 3];
    let views = Views::open(&checkpoint, &Mappings::default(), &wanted, &dtypes, &Options::default()).unwrap();
    let holds: Vec<_> = (0..3).map(|tensor| views.guard(tensor).unwrap()).collect();
    let address = |tensor: usize| views.address(tensor).unwrap();
    for (tensor, size) in sizes.into_iter().enumerate() {
        bytes_at(address(tensor), size).fill(7);
    }
    let [a, b, c] = <[_; 3]>::try_from(holds).ok().unwrap();
    drop(b);
    // What was written there is gone, but for the ends, which share pages with the neighbours.
    let kept = bytes_at(address(1), sizes[1]).iter().filter(|byte| **byte == 7).count();
    let pattern_sevens = files::pattern(1, sizes[1]).iter().filter(|byte| **byte == 7).count();
    assert!(kept < 2 * files::PAGE_BYTES + pattern_sevens, "{kept}");
    for (tensor, hold) in [(0, a), (2, c)] {
        assert!(bytes_at(address(tensor), sizes[tensor]).iter().all(|byte| *byte == 7));
        drop(hold);
    }
}
