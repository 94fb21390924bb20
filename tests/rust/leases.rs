//! Copies under a read lease, and files that other processes want to change meanwhile.

use crate::files::{self, assert_fails};
use crate::host_load::{load, slice};
use crate::smaps::mappings;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::digest::Algorithm;
use fst::digest::manifest::Manifest;
use fst::error::Kind;
use fst::load::check;
use fst::options::{Options, ReaderChoice};
use fst::plan::Read;
use fst::reader::ring::Linux;
use fst::reader::uring::Rings;
use fst::reader::{self, Opened, ReaderKind};
use proptest::prelude::*;
use safetensors::Dtype;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use tempfile::TempDir;

const FILE_BYTES: usize = 300_000;

fn file() -> (TempDir, PathBuf, Vec<u8>) {
    let (directory, path) = files::new_path("x.safetensors");
    let bytes = files::pattern(5, FILE_BYTES);
    fs::write(&path, &bytes).unwrap();
    (directory, path, bytes)
}

fn open(path: &Path, drop_cache: bool) -> Opened {
    let options = Options { reader: ReaderChoice::Lease, drop_cache, ..Options::default() };
    reader::open(&options, &files::source(path), &Arc::new(Rings::new(Linux, &options))).unwrap()
}

/// Returns the bytes that a reader lends, or `None` if it does not.
fn lent(opened: &Opened, offset: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = None;
    let read = Read { offset, slot_begin: 0, length };
    let take = &mut |lent: &[u8]| {
        bytes = Some(lent.to_vec());
        Ok(())
    };
    assert_eq!(opened.reader.lend(&read, take).unwrap(), bytes.is_some());
    bytes
}

#[test]
fn a_reader_lends_bytes_of_the_file() {
    let (_directory, path, bytes) = file();
    let opened = open(&path, false);
    assert_eq!(opened.chosen().kind, ReaderKind::Lease);
    for (begin, end) in [(0, FILE_BYTES), (1, 2), (4095, 8193), (FILE_BYTES - 1, FILE_BYTES)] {
        assert_eq!(lent(&opened, begin as u64, end - begin).unwrap(), &bytes[begin..end]);
    }
    for (begin, length) in [(FILE_BYTES as u64, 1), (u64::MAX, 1), (1, FILE_BYTES)] {
        assert_eq!(lent(&opened, begin, length), None);
    }
}

#[test]
fn pages_that_were_lent_leave_the_process() {
    const MIB: usize = 1 << 20;
    let (_directory, path) = files::new_path("x.safetensors");
    File::create(&path).unwrap().set_len(12 << 20).unwrap();
    let opened = open(&path, false);
    for index in 0..12 {
        let read = Read { offset: (index * MIB) as u64, slot_begin: 0, length: MIB };
        let take = &mut |lent: &[u8]| {
            assert!(lent.iter().step_by(files::PAGE_BYTES).all(|byte| *byte == 0));
            Ok(())
        };
        assert!(opened.reader.lend(&read, take).unwrap());
    }
    let maps = mappings();
    let [mapping] = maps.iter().filter(|mapping| Path::new(&mapping.path) == path).collect::<Vec<_>>()[..] else {
        panic!("the file is mapped once");
    };
    let resident_kib: usize = mapping.words("Rss")[0].parse().unwrap();
    assert!((1..=8 << 10).contains(&resident_kib), "{resident_kib} KiB are resident");
}

#[test]
fn bytes_are_looked_up_unless_the_file_became_shorter() {
    let (_directory, path) = files::new_path("x.safetensors");
    fs::write(&path, files::pattern(5, 4 << 20)).unwrap();
    let opened = open(&path, false);
    files::make_cold(&path);
    opened.reader.look_up(&(1 << 20..2 << 20));
    let pages = (1 << 20) / files::PAGE_BYTES..(2 << 20) / files::PAGE_BYTES;
    assert!(files::cached_pages(&path)[pages].iter().all(|is_cached| *is_cached));
    File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    opened.reader.look_up(&(0..8 << 20));
    assert_eq!(lent(&opened, 0, 1), None);
}

/// A file without a lease is read: a process has it open for writing.
#[test]
fn cached_bytes_are_compared_with_and_without_a_lease() {
    const BYTES: usize = (5 << 20) + 3;
    let (_directory, path) = files::new_path("x.safetensors");
    let bytes = files::pattern(5, BYTES);
    fs::write(&path, &bytes).unwrap();
    for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
        let json = format!(r#"{{"x.safetensors": "{}"}}"#, algorithm.digest(&bytes));
        let manifest = Manifest::parse(json.as_bytes()).unwrap();
        for has_writer in [false, true] {
            let writer = has_writer.then(|| OpenOptions::new().write(true).open(&path).unwrap());
            let reader = reader::open_lending(&Options::default(), &files::source(&path));
            let read = Read { offset: 0, slot_begin: 0, length: BYTES };
            assert_eq!(reader.lend(&read, &mut |_| Ok(())).unwrap(), !has_writer);
            check::check_files(&[&path], &manifest, &Options::default()).unwrap();
            drop(writer);
            files::damage(&path, 3 << 20);
            let writer = has_writer.then(|| OpenOptions::new().write(true).open(&path).unwrap());
            let checked = check::check_files(&[&path], &manifest, &Options::default());
            assert_fails(checked, Kind::Integrity, &["x.safetensors"]);
            drop(writer);
            fs::write(&path, &bytes).unwrap();
        }
    }
}

#[test]
fn a_writer_waits_until_no_thread_copies() {
    let (_directory, path, bytes) = file();
    let opened = open(&path, false);
    assert!(lent(&opened, 0, FILE_BYTES).is_some());
    let writer = thread::spawn({
        let path = path.clone();
        // The lease delays the call. The signal of the kernel would end this process if the reader did not prevent it.
        move || OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap()
    });
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !writer.is_finished() {
                    assert!(lent(&opened, 0, FILE_BYTES).is_none_or(|copied| copied == bytes));
                }
                assert_eq!(lent(&opened, 0, 50), None);
            });
        }
    });
    writer.join().unwrap();
    assert_fails(opened.reader.read(50, &mut [0; 100], &|| Ok(())), Kind::Io, &["x.safetensors", "early"]);
}

/// The kernel tells the holder of a lease that a process waits, by default with a signal that ends the holder.
#[test]
fn writers_that_come_at_any_moment_send_no_signal_that_ends_the_process() {
    let (_directory, path, bytes) = file();
    let opened = open(&path, false);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // Leases that last as short as can be, so that many begin.
                while !is_done.load(Ordering::Relaxed) {
                    assert!(lent(&opened, 0, 1).is_none_or(|copied| copied == bytes[..1]));
                }
            });
        }
        for _ in 0..5_000 {
            OpenOptions::new().write(true).open(&path).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn files_that_may_change_or_leave_the_page_cache_are_read() {
    let (_directory, path, _) = file();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    let refused = open(&path, false).chosen();
    assert_eq!(refused.kind, ReaderKind::Pread);
    assert!(refused.why.starts_with("lease is not available: "), "{}", refused.why);
    drop(writer);
    assert_eq!(open(&path, true).chosen().kind, ReaderKind::Pread);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn columns_have_the_bytes_of_other_readers(
        (rows, row_bytes) in (1_usize..40, 2_usize..200_000),
        (begin, end) in (0.0..0.5, 0.5..1.0),
        chunk_bytes in prop_oneof![Just(4 << 10), Just(256 << 10)],
    ) {
        let directory = TempDir::new().unwrap();
        let tensors = [
            ("columns", Dtype::U8, vec![rows, row_bytes], files::pattern(1, rows * row_bytes)),
            ("whole", Dtype::U8, vec![row_bytes], files::pattern(2, row_bytes)),
        ];
        let checkpoint = Checkpoint::open(&[files::written(&directory, "x.safetensors", &tensors)]).unwrap();
        let [begin, end] = [begin, end].map(|share| (share * row_bytes as f64) as u64);
        let columns = checkpoint.find("columns").unwrap();
        let whole = checkpoint.find("whole").unwrap();
        let wanted = [
            slice(columns.0, columns.1, 1, begin, (end - begin).max(1)),
            TensorRegion::whole(whole.0, whole.1).unwrap(),
        ];
        let wanted = Arc::from(wanted);
        let options = Options { chunk_bytes, threads: 2, ..Options::default() };
        let load = |reader| load(&checkpoint, &wanted, Options { reader, ..options.clone() }).unwrap();
        prop_assert!(load(ReaderChoice::Lease) == load(ReaderChoice::Pread));
    }
}
