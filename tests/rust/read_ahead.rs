//! Read-ahead of mapped files.

use crate::files::{self, PAGE_BYTES};
use fst::reader::mmap::Mapping;
use fst::reader::read_ahead;
use fst::source::Source;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILE_BYTES: usize = 24 << 20;

/// Creates an uncached file and a mapping of it.
fn cold_file(directory: &TempDir) -> (Arc<Source>, Arc<Mapping>) {
    let path = directory.path().join("x.safetensors");
    std::fs::write(&path, files::pattern(1, FILE_BYTES)).unwrap();
    let source = files::source(&path);
    source.file.sync_all().unwrap();
    // SAFETY: advice changes no memory.
    assert_eq!(unsafe { libc::posix_fadvise(source.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
    let mapping = Arc::new(Mapping::open(&source).unwrap());
    (source, mapping)
}

/// Counts cached pages among every 64th page of a range.
fn cached_pages(source: &Source, pages: std::ops::Range<usize>) -> usize {
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

#[test]
fn ranges_of_an_uncached_file_are_read_ahead() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    let ranges = [0..8_u64 << 20, 8 << 20..16 << 20];
    read_ahead::start(&source, &mapping, ranges.into_iter());
    let pages = 0..(16 << 20) / PAGE_BYTES;
    let all = pages.len().div_ceil(64);
    let begin = Instant::now();
    while cached_pages(&source, pages.clone()) < all {
        assert!(begin.elapsed() < Duration::from_secs(30), "the pages were not read");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn read_ahead_ends_with_the_mapping() {
    let directory = TempDir::new().unwrap();
    let (source, mapping) = cold_file(&directory);
    let range = 0..FILE_BYTES as u64;
    read_ahead::start(&source, &mapping, std::iter::once(range));
    drop(mapping);
    // The threads hold references to the file until they end.
    let begin = Instant::now();
    while Arc::strong_count(&source) > 1 {
        assert!(begin.elapsed() < Duration::from_secs(30), "a thread runs without a mapping");
        std::thread::sleep(Duration::from_millis(5));
    }
}
