//! Reads of cached and uncached bytes, and loads that leave the page cache unchanged.
//!
//! The oracle is mincore(2), which no reader uses. A machine may evict pages at any time, so the tests only assert
//! about pages that stayed.

use crate::files::{self, PAGE_BYTES};
use crate::scripted_kernel::{Script, Scripted};
use fst::options::{Options, ReaderChoice};
use fst::plan::Read;
use fst::reader::page_cache::{self, Run};
use fst::reader::ring::Linux;
use fst::reader::uring::Rings;
use fst::reader::{self, Opened, ReaderKind};
use fst::staging::{Request, pool};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

const FILE_BYTES: usize = 6 << 20;

/// Creates a file of which only these ranges are cached, if its file system has a page cache.
fn file(directory: &TempDir, warm: &[(u64, usize)]) -> (PathBuf, Vec<u8>) {
    let path = directory.path().join("x.safetensors");
    let bytes = files::pattern(2, FILE_BYTES - 1000);
    std::fs::write(&path, &bytes).unwrap();
    files::make_cold(&path);
    warm_up(&path, warm);
    (path, bytes)
}

fn warm_up(path: &Path, ranges: &[(u64, usize)]) {
    let file = files::local_file(path);
    for &(begin, length) in ranges {
        let mut into = vec![0; length];
        FileExt::read_exact_at(&file.file, &mut into, begin).unwrap();
    }
}

fn open(path: &Path, reader: ReaderChoice, drop_cache: bool) -> Opened {
    let options = Options { reader, threads: 2, drop_cache, ..Options::default() };
    reader::open(&options, &files::source(path), &Arc::new(Rings::new(Linux, &options))).unwrap()
}

/// Reads the whole file in chunks of 1 MiB, and checks the bytes.
fn read_all(reader: &dyn reader::Reader, bytes: &[u8]) {
    let request = Request { bytes: 1 << 20, node: None, staging_bytes: 256 << 20 };
    let mut slot = pool::take(&request, &|| Ok(())).unwrap().unwrap();
    for (index, chunk) in bytes.chunks(1 << 20).enumerate() {
        let read = Read { offset: (index as u64) << 20, slot_begin: 0, length: chunk.len() };
        reader.fill(&[read], slot.bytes_mut(), &|| Ok(())).unwrap();
        assert!(&slot.bytes_mut()[..chunk.len()] == chunk, "chunk {index}");
    }
}

#[test]
fn runs_match_the_page_cache() {
    let directory = TempDir::new().unwrap();
    for warm in [vec![], vec![(0, FILE_BYTES - 1000)], vec![(4096, 1), (1 << 20, 300_000), (5 << 20, 10_000)]] {
        let (path, bytes) = file(&directory, &warm);
        let source = files::local_file(&path);
        let before = files::cached_pages(&path);
        let runs = page_cache::runs(&source, 0..source.length, PAGE_BYTES as u64);
        // A larger unit that lacks a page is uncached. The runs have no gaps.
        let coarse = page_cache::runs(&source, 5000..source.length, 64 << 10);
        let after = files::cached_pages(&path);
        let seen: Vec<bool> = runs
            .iter()
            .flat_map(|Run { range, is_cached }| {
                vec![*is_cached; ((range.end - range.start) as usize).div_ceil(PAGE_BYTES)]
            })
            .collect();
        assert_eq!(seen.len(), before.len());
        for (page, is_cached) in seen.iter().enumerate() {
            assert!(*is_cached == before[page] || *is_cached == after[page], "page {page}");
        }
        assert_eq!((coarse[0].range.start, coarse[coarse.len() - 1].range.end), (5000, bytes.len() as u64));
        for pair in coarse.windows(2) {
            assert_eq!(pair[0].range.end, pair[1].range.start);
            assert_ne!(pair[0].is_cached, pair[1].is_cached);
            assert_eq!(pair[0].range.end % (64 << 10), 0);
        }
        for Run { range, is_cached } in coarse {
            let pages = range.start as usize / PAGE_BYTES..(range.end as usize).div_ceil(PAGE_BYTES);
            let [before, after] = [&before, &after].map(|all| all[pages.clone()].iter().all(|page| *page));
            assert!(is_cached == before || is_cached == after, "{range:?}");
        }
    }
}

#[test]
fn only_uncached_bytes_are_read_directly() {
    let directory = TempDir::new().unwrap();
    for warm in [vec![], vec![(0, FILE_BYTES - 1000)], vec![(0, 1 << 20), (2 << 20, 1 << 20), (3_500_000, 1)]] {
        let (path, bytes) = file(&directory, &warm);
        let twin = directory.path().join("twin");
        std::fs::write(&twin, &bytes).unwrap();
        let script = Arc::new(Script { twin: Some(twin), ..Script::default() });
        let options = Options { reader: ReaderChoice::Auto, ..Options::default() };
        let rings = Arc::new(Rings::new(Scripted(Arc::clone(&script)), &options));
        let opened = reader::open(&options, &files::source(&path), &rings).unwrap();
        read_all(&*opened.reader, &bytes);
        let offsets = script.offsets.lock().unwrap().clone();
        // Neither reader brings or drops a page here.
        let cached = files::cached_pages(&path);
        let cold_units: Vec<bool> =
            cached.chunks((128 << 10) / PAGE_BYTES).map(|pages| !pages.iter().all(|page| *page)).collect();
        if !cold_units.contains(&true) {
            // Without uncached bytes, no direct reader is opened.
            assert_eq!((offsets.len(), script.rings.load(Ordering::Relaxed)), (0, 0));
            continue;
        }
        // The first request is the probe.
        for begin in offsets.iter().skip(1) {
            assert!(cold_units[*begin as usize >> 17], "{begin} is cached");
        }
        if warm.is_empty() {
            assert_eq!(offsets.len(), 1 + 6 * 2);
        }
        assert_eq!(opened.chosen().kind, ReaderKind::Auto);
    }
}

#[test]
fn auto_reports_refused_direct_reads() {
    let directory = TempDir::new().unwrap();
    let (path, bytes) = file(&directory, &[(0, 1 << 20)]);
    let is_local = !files::cached_pages(&path).iter().all(|page| *page);
    for script in [
        Script { open: Some(libc::EINVAL), ..Script::default() },
        Script { ring: Some(libc::EPERM), ..Script::default() },
        Script { has_no_direct_reads: true, ..Script::default() },
    ] {
        let options = Options { reader: ReaderChoice::Auto, ..Options::default() };
        let rings = Arc::new(Rings::new(Scripted(Arc::new(script)), &options));
        let opened = reader::open(&options, &files::source(&path), &rings).unwrap();
        read_all(&*opened.reader, &bytes);
        let chosen = opened.chosen();
        assert_eq!(chosen.kind, ReaderKind::Pread);
        assert!(!is_local || chosen.why.contains("uring is not available"), "{}", chosen.why);
    }
}

#[test]
fn drop_cache_leaves_the_page_cache_unchanged() {
    let directory = TempDir::new().unwrap();
    let neighbour = directory.path().join("neighbour");
    std::fs::write(&neighbour, vec![1; 1 << 20]).unwrap();
    let (path, bytes) = file(&directory, &[]);
    read_all(&*open(&path, ReaderChoice::Pread, false).reader, &bytes);
    assert!(files::cached_count(&path) > files::cached_pages(&path).len() / 2, "without drop_cache, pages stay cached");
    for warm in [vec![], vec![(0, FILE_BYTES - 1000)], vec![(8192, 1), ((1 << 20) - 1, 2), (3 << 20, 1 << 20)]] {
        for choice in [ReaderChoice::Auto, ReaderChoice::Pread, ReaderChoice::Mmap, ReaderChoice::Uring] {
            let (path, bytes) = file(&directory, &warm);
            File::open(&path).unwrap().sync_all().unwrap();
            let before = files::cached_pages(&path);
            let neighbours = files::cached_count(&neighbour);
            let opened = open(&path, choice, true);
            read_all(&*opened.reader, &bytes);
            let mut into = vec![0; 100_000];
            opened.reader.read(2_000_000, &mut into, &|| Ok(())).unwrap();
            assert!(into == bytes[2_000_000..2_100_000]);
            drop(opened);
            let after = files::cached_pages(&path);
            let came = before.iter().zip(&after).filter(|(before, after)| !**before && **after).count();
            assert_eq!(came, 0, "{choice:?}, warm {warm:?}");
            let stayed = before.iter().zip(&after).filter(|(before, after)| **before && **after).count();
            assert!(stayed * 2 >= before.iter().filter(|page| **page).count(), "{choice:?}, warm {warm:?}");
            assert!(files::cached_count(&neighbour) * 2 >= neighbours);
        }
    }
}

#[test]
fn gaps_of_cached_files_are_skipped() {
    let directory = TempDir::new().unwrap();
    let gap_bytes = |warm: &[(u64, usize)]| {
        let (path, _) = file(&directory, warm);
        open(&path, ReaderChoice::Pread, false).limits().gap_bytes
    };
    let cold = gap_bytes(&[]);
    assert!(gap_bytes(&[(0, FILE_BYTES - 1000)]) < cold);
    assert_eq!(gap_bytes(&[(0, FILE_BYTES / 2)]), cold);
}
