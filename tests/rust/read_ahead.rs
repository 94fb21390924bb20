//! Read-ahead of mapped files.

use crate::files::{self, PAGE_BYTES};
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::load::shared_cache;
use fst::os::local_file::LocalFile;
use fst::reader::mmap::Mapping;
use fst::reader::read_ahead;
use safetensors::Dtype;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILE_BYTES: usize = 24 << 20;

/// Creates an uncached file and a mapping of it.
fn cold_file(directory: &TempDir) -> (Arc<LocalFile>, Arc<Mapping>) {
    let path = directory.path().join("x.safetensors");
    std::fs::write(&path, files::pattern(1, FILE_BYTES)).unwrap();
    let source = files::local_file(&path);
    files::make_cold(&path);
    let mapping = Arc::new(Mapping::open(&source).unwrap().unwrap());
    (source, mapping)
}

/// Counts cached pages among every 64th page of a range.
fn cached_pages(source: &LocalFile, pages: Range<usize>) -> usize {
    pages
        .step_by(64)
        .filter(|page| {
            let mut byte = 0_u8;
            let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
            let offset = (page * PAGE_BYTES) as i64;
            // SAFETY: one byte is read into a byte.
            unsafe { libc::preadv2(source.file.as_raw_fd(), &raw const into, 1, offset, libc::RWF_NOWAIT) == 1 }
        })
        .count()
}

fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_done() {
        assert!(begin.elapsed() < Duration::from_secs(30), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranges_of_an_uncached_file_are_read_ahead() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    let ranges = [0..8_u64 << 20, 8 << 20..16 << 20];
    read_ahead::start(&source, &mapping, ranges.into_iter(), false);
    let pages = 0..(16 << 20) / PAGE_BYTES;
    let all = pages.len().div_ceil(64);
    wait_until("the pages are read", || cached_pages(&source, pages.clone()) >= all);
}

#[test]
fn read_ahead_ends_with_the_mapping() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    let range = 0..FILE_BYTES as u64;
    read_ahead::start(&source, &mapping, std::iter::once(range), false);
    drop(mapping);
    // The threads hold references to the file until they end.
    wait_until("the threads have ended", || Arc::strong_count(&source) == 1);
}

/// Returns how many pages are cached after the first byte of each range was used.
fn cached_after_use(source: &LocalFile, mapping: &Mapping, ranges: &[Range<u64>]) -> usize {
    for range in ranges {
        let address = mapping.address(range.start).unwrap();
        // SAFETY: the byte is in the mapping.
        unsafe { std::ptr::with_exposed_provenance::<u8>(address as usize).read_volatile() };
    }
    files::cached_count(&source.path)
}

#[test]
fn a_few_small_ranges_are_read_without_their_neighbours() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    let ranges: Vec<Range<u64>> = (1..6).map(|index| index * (4 << 20)).map(|at| at..at + 10_000).collect();
    read_ahead::start(&source, &mapping, ranges.iter().cloned(), false);
    // 10,000 bytes are three pages.
    assert!(cached_after_use(&source, &mapping, &ranges) <= 3 * ranges.len());
}

#[test]
fn small_ranges_in_a_row_are_left_to_the_kernel() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    read_ahead::start(&source, &mapping, std::iter::once(8 << 20..(8 << 20) + 10_000), true);
    assert_eq!(files::cached_count(&source.path), 0);
}

#[test]
fn columns_are_read_ahead_if_their_rows_are_near() {
    let directory = TempDir::new().unwrap();
    let shapes = [("far", vec![32, 1 << 16]), ("near", vec![512, 1 << 12])];
    let tensors = shapes.map(|(name, shape)| (name, Dtype::U8, shape, files::pattern(1, 2 << 20)));
    let path = files::written(&directory, "x.safetensors", &tensors);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let columns = |name: &str| {
        let (source, entry) = checkpoint.find(name).unwrap();
        let rows = IndexRange::whole(entry.shape[0]);
        TensorRegion::indexed(source, entry, &[rows, IndexRange { start: 0, length: 1 << 10, step: 1 }]).unwrap()
    };
    let regions: Arc<[TensorRegion]> = Arc::new([columns("far"), columns("near")]);
    files::make_cold(&path);
    shared_cache::read_ahead(&checkpoint, &regions);
    // All pages of the rows, but for those after the last columns.
    let expected = ((2 << 20) - 3 * (1 << 10)) / PAGE_BYTES;
    wait_until("the pages are read", || files::cached_count(&path) >= expected);
    assert!(files::cached_count(&path) <= expected + 2);
}
