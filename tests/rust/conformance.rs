//! Contract of readers, tested on every reader, and faults of a file system.

use crate::files::{self, assert_fails};
use fst::error::Kind;
use fst::options::{Options, ReaderChoice};
use fst::os::file_system::{FileSystem, mount_type};
use fst::os::retry::Check;
use fst::plan::Read;
use fst::reader::pread::{PreadReader, ReadAt};
use fst::reader::ring::Linux;
use fst::reader::uring::Rings;
use fst::reader::{self, Access, ReadLimits, Reader, ReaderKind};
use fst::staging::{Request, pool};
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Check that never ends a read.
const GO_ON: Check<'static> = &|| Ok(());

const READERS: [ReaderChoice; 5] =
    [ReaderChoice::Mmap, ReaderChoice::Pread, ReaderChoice::Uring, ReaderChoice::Auto, ReaderChoice::Lease];

/// Opens the reader of a file for a user's choice.
fn open(choice: ReaderChoice, path: &Path, drop_cache: bool) -> Arc<dyn Reader> {
    let options = Options { reader: choice, threads: 2, queue_depth: 6, drop_cache, ..Options::default() };
    let rings = Arc::new(Rings::new(Linux, &options));
    reader::open(&options, &files::source(path), &rings).unwrap().reader
}

fn check_contract(reader: &dyn Reader, bytes: &[u8]) {
    let length = bytes.len();
    for (begin, end) in
        [(0, 0), (0, 1), (0, length), (1, length - 1), (4095, 4097), (length - 1, length), (length, length)]
    {
        let mut into = vec![0xAA; end - begin];
        reader.read(begin as u64, &mut into, GO_ON).unwrap();
        assert_eq!(into, &bytes[begin..end], "{begin}..{end}");
    }
    // Several reads of one chunk, each at its position in the slot.
    let mut slot = vec![0xAA; 3000];
    let reads = [(17, 0, 1000), (70_001, 1001, 1), (length - 1500, 1002, 1500)]
        .map(|(offset, slot_begin, length)| Read { offset: offset as u64, slot_begin, length });
    reader.fill(&reads, &mut slot, GO_ON).unwrap();
    for read in reads {
        let begin = read.offset as usize;
        assert_eq!(slot[read.slot_begin..][..read.length], bytes[begin..begin + read.length]);
    }
    // Reads as planned, with room to widen each: at the begin and the end of the file, and across blocks.
    let alignment = reader.limits().alignment as usize;
    let shifts = [0, 1, 511, 512, 513, 4095, 4096, 4097];
    let begins = shifts.iter().flat_map(|shift| [*shift, 700_000 + shift, length - 4_097 - shift]);
    let planned = begins.flat_map(|begin| [1, 4096, 4097].map(|count| (begin, count)));
    let planned: Vec<(usize, usize)> = planned.chain([(0, length), (1, length - 1), (length - 1, 1)]).collect();
    for reads in planned.chunks(3) {
        check_planned(reader, bytes, reads, alignment);
    }
    // Several threads at once.
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                for step in 0..200 {
                    let begin = (thread * 7919 + step * 104_729) % (length - 100);
                    let mut into = [0; 100];
                    reader.read(begin as u64, &mut into, GO_ON).unwrap();
                    assert_eq!(into, bytes[begin..begin + 100]);
                }
            });
        }
    });
    // The end of the file is an error that names the file and the byte.
    for (begin, count) in [(length - 1, 2), (length, 1), (length + 5000, 3)] {
        let read = reader.read(begin as u64, &mut vec![0; count], GO_ON);
        assert_fails(read, Kind::Io, &["x.safetensors", "byte ", "early"]);
    }
}

/// Performs planned reads into one slot, and checks that no byte outside their blocks changes.
fn check_planned(reader: &dyn Reader, bytes: &[u8], reads: &[(usize, usize)], alignment: usize) {
    let mut reached = 0;
    let reads: Vec<Read> = reads
        .iter()
        .map(|&(begin, length)| {
            let slot_begin = reached + begin % alignment;
            // One more block than needed, which must not change.
            reached = (slot_begin + length).next_multiple_of(alignment) + alignment;
            Read { offset: begin as u64, slot_begin, length }
        })
        .collect();
    let request = Request { bytes: reached.next_multiple_of(4096), node: None, staging_bytes: 256 << 20 };
    let mut slot = pool::take(&request, &|| Ok(())).unwrap().unwrap();
    slot.bytes_mut().fill(0xAA);
    reader.fill(&reads, slot.bytes_mut(), GO_ON).unwrap();
    for read in reads {
        let (slot, begin) = (slot.bytes_mut(), read.offset as usize);
        assert!(slot[read.slot_begin..][..read.length] == bytes[begin..begin + read.length], "{read:?}");
        let end = (read.slot_begin + read.length).next_multiple_of(alignment);
        assert!(slot[end..end + alignment].iter().all(|byte| *byte == 0xAA), "written behind {read:?}");
    }
}

#[test]
fn every_reader_obeys_the_contract() {
    let directory = TempDir::new().unwrap();
    let bytes = files::pattern(3, 1_500_001);
    let path = directory.path().join("x.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    for kind in READERS {
        for drop_cache in [false, true] {
            // Uncached if the file system supports it, then as the first round leaves it.
            files::make_cold(&path);
            for _ in 0..2 {
                check_contract(&*open(kind, &path, drop_cache), &bytes);
            }
        }
    }
}

#[test]
fn files_shorter_than_a_block_are_read() {
    let directory = TempDir::new().unwrap();
    for length in [1, 8, 511, 512, 513, 4095] {
        let bytes = files::pattern(length, length);
        let path = directory.path().join("x.safetensors");
        std::fs::write(&path, &bytes).unwrap();
        for kind in READERS {
            files::make_cold(&path);
            let reader = open(kind, &path, false);
            check_planned(&*reader, &bytes, &[(0, length), (length - 1, 1)], reader.limits().alignment as usize);
        }
    }
}

#[test]
fn a_file_truncated_while_open_is_an_error_with_every_reader() {
    for kind in READERS {
        for length in [0, 1, 4096, 99_999] {
            let (_directory, path) = files::new_path("x.safetensors");
            std::fs::write(&path, files::pattern(4, 100_000)).unwrap();
            let reader = open(kind, &path, false);
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            let request = Request { bytes: 128 << 10, node: None, staging_bytes: 256 << 20 };
            let mut slot = pool::take(&request, &|| Ok(())).unwrap().unwrap();
            let read = Read { offset: 0, slot_begin: 0, length: 100_000 };
            for result in [reader.read(0, &mut vec![0; 100_000], GO_ON), reader.fill(&[read], slot.bytes_mut(), GO_ON)]
            {
                assert_fails(result, Kind::Io, &[&format!("byte {length}:")]);
            }
        }
    }
}

/// File whose first reads follow a script. Later reads succeed in full.
struct Scripted {
    bytes: Vec<u8>,
    path: PathBuf,
    script: Mutex<Vec<io::Result<usize>>>,
}

impl Scripted {
    fn reader(script: Vec<io::Result<usize>>) -> PreadReader<Scripted> {
        let path = PathBuf::from("x.safetensors");
        PreadReader::new(Scripted { bytes: files::pattern(5, 10_000), path, script: Mutex::new(script) })
    }
}

impl ReadAt for Scripted {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut script = self.script.lock().unwrap();
        let most = if script.is_empty() { usize::MAX } else { script.remove(0)? };
        let rest = self.bytes.get(offset as usize..).unwrap_or_default();
        let count = most.min(into.len()).min(rest.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
    fn path(&self) -> &Path {
        &self.path
    }
}

#[test]
fn short_and_interrupted_reads_are_resumed() {
    let scripts: Vec<Vec<io::Result<usize>>> = vec![
        vec![],
        (0..100).map(|index| Ok(1 + index % 7)).collect(),
        vec![Err(io::Error::from_raw_os_error(libc::EINTR)), Ok(10), Err(io::Error::from_raw_os_error(libc::EINTR))],
        vec![Err(io::Error::from_raw_os_error(libc::EAGAIN)), Ok(3), Err(io::Error::from_raw_os_error(libc::EAGAIN))],
    ];
    for script in scripts {
        let mut into = vec![0; 9_000];
        Scripted::reader(script).read(500, &mut into, GO_ON).unwrap();
        assert_eq!(into, files::pattern(5, 10_000)[500..9_500]);
    }
}

/// File system that is interrupted or busy for ever.
struct Endless(i32);

impl ReadAt for Endless {
    fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(self.0))
    }
    fn path(&self) -> &Path {
        Path::new("x.safetensors")
    }
}

#[test]
fn reads_that_are_repeated_for_ever_end_with_the_check() {
    for code in [libc::EINTR, libc::EAGAIN] {
        let check = files::fails_after(3);
        let read = PreadReader::new(Endless(code)).read(0, &mut [0; 10], &check);
        assert_fails(read, Kind::Interrupted, &[]);
    }
}

#[test]
fn an_error_in_the_middle_names_the_byte() {
    let reader = Scripted::reader(vec![Ok(100), Err(io::Error::from_raw_os_error(libc::EIO))]);
    let read = reader.read(500, &mut [0; 1_000], GO_ON);
    assert_fails(read, Kind::Io, &["x.safetensors", "byte 600:", "os error 5"]);
}

#[test]
fn the_choice_follows_access_and_options() {
    let directory = TempDir::new().unwrap();
    let path = files::raw(&directory, "x.safetensors", "{}", &[]);
    let source = files::source(&path);
    let choose = |choice, access, drop_cache| {
        let options = Options { reader: choice, drop_cache, ..Options::default() };
        reader::choose(&options, &source, access).unwrap().kind
    };
    assert_eq!(choose(ReaderChoice::Auto, Access::View, false), ReaderKind::Mmap);
    assert_eq!(choose(ReaderChoice::Pread, Access::View, false), ReaderKind::Pread);
    assert_eq!(choose(ReaderChoice::Uring, Access::View, false), ReaderKind::Uring);
    assert_eq!(choose(ReaderChoice::Mmap, Access::View, false), ReaderKind::Mmap);
    assert_eq!(choose(ReaderChoice::Mmap, Access::Copy, false), ReaderKind::Pread);
    // Bytes that are copied come from the page cache where it holds them, unless the file system is in memory.
    let copied = choose(ReaderChoice::Auto, Access::Copy, false);
    match FileSystem::of(&source.file().unwrap().file) {
        FileSystem::Local => assert_eq!(copied, ReaderKind::Auto),
        FileSystem::Memory(_) | FileSystem::Remote(_) => assert_eq!(copied, ReaderKind::Pread),
    }
    // Mapped pages cannot be dropped from the page cache.
    assert_eq!(choose(ReaderChoice::Mmap, Access::View, true), ReaderKind::Pread);
    assert_eq!(choose(ReaderChoice::Auto, Access::View, true), copied);
}

#[test]
fn file_systems_in_memory_are_detected() {
    let directory = TempDir::new_in("/dev/shm").unwrap();
    let path = files::raw(&directory, "x.safetensors", "{}", &[]);
    let source = files::source(&path);
    let file = &source.file().unwrap().file;
    assert_eq!(FileSystem::of(file), FileSystem::Memory("tmpfs"));
    assert_eq!(mount_type(file).as_deref(), Some("tmpfs"));
    let options = Options::default();
    assert_eq!(reader::choose(&options, &source, Access::Copy).unwrap().kind, ReaderKind::Pread);
    assert_eq!(reader::choose(&options, &source, Access::View).unwrap().kind, ReaderKind::Mmap);
}

#[test]
fn limits_of_readers_merge_to_what_suits_all_files() {
    let directory = TempDir::new().unwrap();
    let path = files::raw(&directory, "x.safetensors", "{}", &[]);
    for choice in [ReaderChoice::Mmap, ReaderChoice::Pread] {
        assert_eq!(open(choice, &path, false).limits(), ReadLimits::BUFFERED);
        assert_eq!(open(choice, &path, true).limits(), ReadLimits::BUFFERED);
    }
    let direct = ReadLimits { concurrency: 3, ..ReadLimits::direct(32 << 10) };
    assert_eq!((direct.gap_bytes, direct.in_place_bytes), (32 << 10, None));
    assert_eq!(ReadLimits::BUFFERED.merge(direct), direct);
    assert_eq!(direct.merge(ReadLimits::BUFFERED), direct);
    assert_eq!(ReadLimits::BUFFERED.merge(ReadLimits::direct(1)), ReadLimits::BUFFERED);
}
