//! One test of the contract over every reader, and the faults that a file system can throw at one.

use crate::files;
use fst::error::Kind;
use fst::options::ReaderChoice;
use fst::plan::Read;
use fst::reader::pread::{PreadReader, ReadAt};
use fst::reader::{self, Buffer, Reader, ReaderKind, Target};
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tempfile::TempDir;

const READERS: [ReaderChoice; 2] = [ReaderChoice::Mmap, ReaderChoice::Pread];

fn check_contract(reader: &dyn Reader, bytes: &[u8]) {
    let length = bytes.len();
    for (begin, end) in
        [(0, 0), (0, 1), (0, length), (1, length - 1), (4095, 4097), (length - 1, length), (length, length)]
    {
        let mut into = vec![0xAA; end - begin];
        reader.read(begin as u64, &mut into).unwrap();
        assert_eq!(into, &bytes[begin..end], "{begin}..{end}");
    }
    // Several reads of a chunk, each where it belongs in the slot.
    let mut slot = vec![0xAA; 3000];
    let reads = [(17, 0, 1000), (70_001, 1001, 1), (length - 1500, 1002, 1500)]
        .map(|(offset, slot_begin, length)| Read { offset: offset as u64, slot_begin, length });
    reader.fill(&reads, Buffer { id: 0, bytes: &mut slot }).unwrap();
    for read in reads {
        let begin = read.offset as usize;
        assert_eq!(slot[read.slot_begin..][..read.length], bytes[begin..begin + read.length]);
    }
    // Several threads at once.
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                for step in 0..200 {
                    let begin = (thread * 7919 + step * 104_729) % (length - 100);
                    let mut into = [0; 100];
                    reader.read(begin as u64, &mut into).unwrap();
                    assert_eq!(into, bytes[begin..begin + 100]);
                }
            });
        }
    });
    // The end of the file is an error that names the file and the byte.
    for (begin, count) in [(length - 1, 2), (length, 1), (length + 5000, 3)] {
        let error = reader.read(begin as u64, &mut vec![0; count]).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        let text = error.to_string();
        assert!(text.contains("x.safetensors") && text.contains("byte ") && text.contains("early"), "{text}");
    }
}

#[test]
fn every_reader_keeps_the_contract() {
    let directory = TempDir::new().unwrap();
    let bytes = files::pattern(3, 300_001);
    let path = directory.path().join("x.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    for kind in READERS {
        check_contract(&*reader::open(kind, &files::source(&path), Target::HostMemory).unwrap(), &bytes);
    }
}

#[test]
fn a_file_cut_while_it_is_open_is_an_error_with_every_reader() {
    for kind in READERS {
        for length in [0, 1, 4096, 99_999] {
            let directory = TempDir::new().unwrap();
            let path = directory.path().join("x.safetensors");
            std::fs::write(&path, files::pattern(4, 100_000)).unwrap();
            let reader = reader::open(kind, &files::source(&path), Target::HostMemory).unwrap();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            let error = reader.read(0, &mut vec![0; 100_000]).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{kind:?}");
            assert!(error.to_string().contains(&format!("byte {length}:")), "{kind:?}: {error}");
        }
    }
}

/// A file that answers as its script says; after the script it reads in full.
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
        Scripted::reader(script).read(500, &mut into).unwrap();
        assert_eq!(into, files::pattern(5, 10_000)[500..9_500]);
    }
}

#[test]
fn an_error_in_the_middle_names_the_byte() {
    let reader = Scripted::reader(vec![Ok(100), Err(io::Error::from_raw_os_error(libc::EIO))]);
    let error = reader.read(500, &mut [0; 1_000]).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    let text = error.to_string();
    assert!(text.contains("x.safetensors") && text.contains("byte 600:") && text.contains("os error 5"), "{text}");
}

#[test]
fn the_choice_follows_destination_and_wish() {
    let directory = TempDir::new().unwrap();
    let path = files::raw(&directory, "x.safetensors", "{}", &[]);
    let source = files::source(&path);
    let choose = |choice, target| reader::choose(choice, &source, target).unwrap();
    assert_eq!(choose(ReaderChoice::Auto, Target::NewHostMemory), ReaderKind::Mmap);
    assert_eq!(choose(ReaderChoice::Auto, Target::HostMemory), ReaderKind::Pread);
    assert_eq!(choose(ReaderChoice::Pread, Target::NewHostMemory), ReaderKind::Pread);
    assert_eq!(choose(ReaderChoice::Mmap, Target::HostMemory), ReaderKind::Mmap);
}
