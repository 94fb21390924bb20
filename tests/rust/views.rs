//! Views of mapped files, and tensors that are read.

use crate::files;
use crate::host_load::slice;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::dtype::Dtype;
use fst::load::views::{Mappings, Views};
use fst::options::{Options, ReaderChoice};
use tempfile::TempDir;

/// Tensors whose data begins at a multiple of eight, except for "odd", which is at an odd offset.
const JSON: &str = r#"{"f":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},"none":{"dtype":"F32","shape":[0],"data_offsets":[32,32]},"b":{"dtype":"U8","shape":[3],"data_offsets":[32,35]},"odd":{"dtype":"F32","shape":[2],"data_offsets":[35,43]}}"#;

struct Trial {
    checkpoint: Checkpoint,
    data: Vec<u8>,
    /// Offset of the data section in the file.
    begin: u64,
}

impl Trial {
    fn new() -> Trial {
        let directory = TempDir::new().unwrap();
        let json = format!("{JSON:<width$}", width = JSON.len().next_multiple_of(8));
        let data = files::pattern(6, 43);
        let path = files::raw(&directory, "x.safetensors", &json, &data);
        let checkpoint = Checkpoint::open(&[path]).unwrap();
        Trial { checkpoint, data, begin: 8 + json.len() as u64 }
    }

    fn whole(&self, name: &str) -> TensorRegion {
        let (source, entry) = self.checkpoint.find(name).unwrap();
        TensorRegion::whole(source, entry).unwrap()
    }

    fn slice(&self, name: &str, dim: usize, start: u64, length: u64) -> TensorRegion {
        let (source, entry) = self.checkpoint.find(name).unwrap();
        slice(source, entry, dim, start, length)
    }

    fn views(&self, regions: &[TensorRegion], dtypes: &[Option<Dtype>], options: &Options) -> Views {
        Views::open(&self.checkpoint, &Mappings::default(), regions, dtypes, options).unwrap()
    }

    /// Returns which of these regions are views with the dtype of the file, and checks the bytes of the views.
    fn viewed(&self, regions: &[TensorRegion]) -> Vec<bool> {
        let dtypes: Vec<_> = regions.iter().map(|region| Some(region.dtype)).collect();
        let views = self.views(regions, &dtypes, &Options::default());
        let check = |(tensor, region): (usize, &TensorRegion)| {
            let Some(address) = views.address(tensor) else { return false };
            let _guard = views.guard(tensor).unwrap();
            let range = region.contiguous().unwrap();
            let length = (range.end - range.start) as usize;
            let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
            // SAFETY: the view is mapped while `views` lives.
            let found = unsafe { std::slice::from_raw_parts(pointer, length) };
            assert_eq!(found, &self.data[(range.start - self.begin) as usize..][..length]);
            true
        };
        regions.iter().enumerate().map(check).collect()
    }
}

#[test]
fn aligned_contiguous_regions_are_views_once() {
    let trial = Trial::new();
    // An empty tensor has no address, and a float at an odd offset cannot be used in place.
    let regions = ["f", "none", "b", "odd", "f"].map(|name| trial.whole(name));
    assert_eq!(trial.viewed(&regions), [true, false, true, false, false]);
    // Rows are contiguous, and columns only if they are all of a row.
    for (dim, start, length, is_view) in [(0, 1, 2, true), (1, 0, 1, false), (1, 0, 2, true), (0, 1, 0, false)] {
        assert_eq!(trial.viewed(&[trial.slice("f", dim, start, length)]), [is_view], "{dim} {start} {length}");
    }
    // Regions that share a row, in any order, and one that does not.
    let parts = [trial.slice("f", 0, 2, 2), trial.slice("f", 0, 0, 1), trial.slice("f", 0, 1, 2)];
    assert_eq!(trial.viewed(&parts), [false, true, true]);
}

#[test]
fn readers_without_mappings_have_no_views() {
    let trial = Trial::new();
    let regions = [trial.whole("f")];
    let dtypes = [Some(Dtype::F32)];
    for options in [
        Options { reader: ReaderChoice::Pread, ..Options::default() },
        Options { reader: ReaderChoice::Uring, ..Options::default() },
        Options { drop_cache: true, ..Options::default() },
        Options { reader: ReaderChoice::Mmap, drop_cache: true, ..Options::default() },
    ] {
        let views = trial.views(&regions, &dtypes, &options);
        assert_eq!(views.address(0), None, "{options:?}");
        assert!(views.guard(0).is_err());
    }
    // A file without possible views is not mapped.
    assert!(trial.views(&[trial.whole("odd")], &dtypes, &Options::default()).guard(0).is_err());
}

fn bytes_at(address: u64, length: usize) -> &'static mut [u8] {
    // SAFETY: the tests access views only while they hold their guards.
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
    // Also after the views that had them were dropped.
    drop((first, again));
    assert_eq!(bytes_at(open("f").address(0).unwrap(), 32), &trial.data[..32]);
}

/// Three tensors. Only the middle one has whole pages of its own.
#[test]
fn a_dropped_view_drops_its_own_pages_only() {
    let directory = TempDir::new().unwrap();
    let sizes = [100, 5 * files::PAGE_BYTES, 100];
    let tensors = ["a", "b", "c"].iter().zip(sizes).enumerate();
    let tensors: Vec<_> = tensors
        .map(|(seed, (name, size))| (*name, safetensors::Dtype::U8, vec![size], files::pattern(seed, size)))
        .collect();
    let path = files::written(&directory, "x.safetensors", &tensors);
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    let regions: Vec<_> =
        checkpoint.entries().map(|(source, entry)| TensorRegion::whole(source, entry).unwrap()).collect();
    let dtypes = vec![Some(Dtype::U8); 3];
    let views = Views::open(&checkpoint, &Mappings::default(), &regions, &dtypes, &Options::default()).unwrap();
    let holds: Vec<_> = (0..3).map(|tensor| views.guard(tensor).unwrap()).collect();
    let address = |tensor: usize| views.address(tensor).unwrap();
    for (tensor, size) in sizes.into_iter().enumerate() {
        bytes_at(address(tensor), size).fill(7);
    }
    let [a, b, c] = <[_; 3]>::try_from(holds).ok().unwrap();
    drop(b);
    // The written bytes are gone, except at the ends, which share pages with the neighbours.
    let kept = bytes_at(address(1), sizes[1]).iter().filter(|byte| **byte == 7).count();
    let pattern_sevens = files::pattern(1, sizes[1]).iter().filter(|byte| **byte == 7).count();
    assert!(kept < 2 * files::PAGE_BYTES + pattern_sevens, "{kept}");
    for (tensor, hold) in [(0, a), (2, c)] {
        assert!(bytes_at(address(tensor), sizes[tensor]).iter().all(|byte| *byte == 7));
        drop(hold);
    }
}
