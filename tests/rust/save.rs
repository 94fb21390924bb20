//! Saves and writers: files are complete or absent, also when system calls fail.

use crate::files::{self, address_of};
use fst::device::host::Host;
use fst::dtype::Dtype;
use fst::error::{Error, Kind};
use fst::format::Metadata;
use fst::format::layout::{Layout, Tensor};
use fst::options::Options;
use fst::save::atomic_file::{self, OutputFile};
use fst::save::file_kernel::{FileKernel, Linux};
use fst::save::writer::Writer;
use fst::save::{DeviceStream, Extent, Save};
use proptest::prelude::*;
use rustix::fs::{OFlags, fcntl_getfl};
use safetensors::SafeTensors;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// Options with small chunks, so that small tensors fill several.
fn tight() -> Options {
    Options { chunk_bytes: 8 << 10, staging_bytes: 32 << 10, threads: 3, ..Options::default() }
}

fn host() -> Vec<DeviceStream> {
    vec![DeviceStream { memory: Arc::new(Host), stream: 0 }]
}

pub fn kernel() -> Box<dyn FileKernel> {
    Box::new(Linux)
}

/// Returns tensors of dtype U8 with these sizes.
pub fn sample(sizes: &[usize]) -> Vec<(String, Vec<u8>)> {
    sizes.iter().enumerate().map(|(index, &size)| (format!("t{index:03}"), files::pattern(index, size))).collect()
}

fn tensor(name: &str, bytes: usize) -> Tensor {
    Tensor::new(name, Dtype::U8, vec![bytes as u64]).unwrap()
}

/// Adds the tensor "a" to a writer, and appends its data.
fn append(writer: &mut Writer, length: usize) -> fst::Result<()> {
    let bytes = files::pattern(1, length);
    writer.add(tensor("a", length)).unwrap();
    // SAFETY: the bytes outlive the call and do not change.
    unsafe { writer.append(&Host, 0, address_of(&bytes), length as u64) }
}

fn described(tensors: &[(String, Vec<u8>)]) -> Vec<Tensor> {
    tensors.iter().map(|(name, bytes)| tensor(name, bytes.len())).collect()
}

/// Saves tensors, `step` of them per call.
fn save(path: &Path, tensors: &[(String, Vec<u8>)], kernel: Box<dyn FileKernel>, step: usize) -> fst::Result<()> {
    save_with(path, tensors, &None, kernel, step)
}

pub fn save_with(
    path: &Path,
    tensors: &[(String, Vec<u8>)],
    metadata: &Metadata,
    kernel: Box<dyn FileKernel>,
    step: usize,
) -> fst::Result<()> {
    let layout = Layout::new(&described(tensors), metadata)?;
    let order = layout.order().to_vec();
    let mut save = Save::begin(layout, OutputFile::create(path, kernel)?, host(), &tight())?;
    for indices in order.chunks(step) {
        let extent = |&index: &usize| {
            let bytes = &tensors[index].1;
            Extent { device: 0, address: address_of(bytes), length: bytes.len() as u64 }
        };
        let extents: Vec<Extent> = indices.iter().map(extent).collect();
        // SAFETY: the tensors outlive the call and do not change.
        unsafe { save.append(&extents, &[]) }?;
    }
    save.finish()
}

/// Writes tensors one by one with a writer.
fn write(path: &Path, tensors: &[(String, Vec<u8>)], kernel: Box<dyn FileKernel>) -> fst::Result<()> {
    write_with(path, tensors, None, kernel)
}

pub fn write_with(
    path: &Path,
    tensors: &[(String, Vec<u8>)],
    metadata: Metadata,
    kernel: Box<dyn FileKernel>,
) -> fst::Result<()> {
    let mut writer = Writer::begin(OutputFile::create(path, kernel)?, metadata, None, &tight())?;
    for (tensor, (_, bytes)) in described(tensors).into_iter().zip(tensors) {
        writer.add(tensor)?;
        let mut copy = bytes.clone();
        // SAFETY: the copy is valid until it is overwritten after the call.
        unsafe { writer.append(&Host, 0, address_of(&copy), copy.len() as u64) }?;
        copy.fill(0xEE);
    }
    writer.finish()
}

fn expected(tensors: &[(String, Vec<u8>)]) -> Vec<u8> {
    let directory = TempDir::new().unwrap();
    let list: Vec<_> = tensors
        .iter()
        .map(|(name, bytes)| (name.as_str(), safetensors::tensor::Dtype::U8, vec![bytes.len()], bytes.clone()))
        .collect();
    fs::read(files::written(&directory, "x", &list)).unwrap()
}

/// Checks that the `safetensors` crate reads these tensors from the file.
fn assert_holds(path: &Path, tensors: &[(String, Vec<u8>)]) {
    let file = fs::read(path).unwrap();
    let found = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(found.len(), tensors.len());
    for (name, bytes) in tensors {
        assert!(found.tensor(name).unwrap().data() == bytes, "{name}");
    }
}

fn names_in(directory: &TempDir) -> Vec<String> {
    fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

const SIZES: [usize; 9] = [3, 0, 40_000, 1, 4096, 8192, 12_345, 7, 100_001];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn tensors_of_any_size_are_saved_and_written(sizes in prop::collection::vec(0..30_000_usize, 0..20), step in 1..5_usize) {
        let (_directory, path) = files::new_path("x");
        let tensors = sample(&sizes);
        save(&path, &tensors, kernel(), step).unwrap();
        prop_assert!(fs::read(&path).unwrap() == expected(&tensors));
        write(&path, &tensors, kernel()).unwrap();
        assert_holds(&path, &tensors);
    }
}

#[test]
fn a_header_longer_than_the_reserved_space_moves_the_data() {
    let (directory, path) = files::new_path("x");
    // The first block is full before most names are known.
    let mut tensors = sample(&[20_000]);
    tensors.extend((0..4000).map(|index| (format!("{index:0100}"), vec![index as u8; 3])));
    write(&path, &tensors, kernel()).unwrap();
    assert_holds(&path, &tensors);
    write(&path, &tensors, Box::new(FaultyKernel::new(Fault::NoInsert))).unwrap();
    assert_holds(&path, &tensors);
    assert_eq!(names_in(&directory), ["x"]);
}

/// Fault of a system call.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    /// Short writes, and writes that fail with EINTR and EAGAIN.
    Short,
    /// Error of the write with this number.
    FailWrite(usize, i32),
    /// Direct writes that succeed at first and fail later.
    RefuseDirect,
    NoDirect,
    NoReserve,
    NoSpace,
    NoInsert,
    FailFlush,
    /// Flushes of directories that fail.
    FailDirectoryFlush,
    /// Every call fails with this error.
    Endless(i32),
    EndlessWrites(i32),
}

struct FaultyKernel {
    fault: Fault,
    calls: AtomicUsize,
}

impl FaultyKernel {
    fn new(fault: Fault) -> FaultyKernel {
        FaultyKernel { fault, calls: AtomicUsize::new(0) }
    }
}

fn code<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

impl FileKernel for FaultyKernel {
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Short => match call % 4 {
                0 => code(libc::EINTR),
                1 => code(libc::EAGAIN),
                _ => {
                    // A short direct write ends at a block boundary.
                    let half = bytes.len() / 2;
                    let length = if half >= 4096 { half - half % 4096 } else { bytes.len() };
                    file.write_at(&bytes[..length], offset)
                }
            },
            Fault::FailWrite(at, error) if call == at => code(error),
            Fault::Endless(error) | Fault::EndlessWrites(error) => code(error),
            Fault::RefuseDirect if call > 2 && is_direct(file) => code(libc::EINVAL),
            _ => file.write_at(bytes, offset),
        }
    }

    fn set_direct(&self, file: &File, is_direct: bool) -> io::Result<()> {
        match self.fault {
            Fault::NoDirect => code(libc::EINVAL),
            _ => Linux.set_direct(file, is_direct),
        }
    }

    fn reserve(&self, file: &File, bytes: u64) -> io::Result<()> {
        match self.fault {
            Fault::NoReserve => code(libc::EOPNOTSUPP),
            Fault::NoSpace => code(libc::ENOSPC),
            Fault::Endless(error) => code(error),
            _ => Linux.reserve(file, bytes),
        }
    }

    fn insert(&self, file: &File, bytes: u64) -> io::Result<()> {
        match self.fault {
            Fault::NoInsert => code(libc::EOPNOTSUPP),
            Fault::Endless(error) => code(error),
            _ => Linux.insert(file, bytes),
        }
    }

    fn flush(&self, file: &File) -> io::Result<()> {
        match self.fault {
            Fault::FailFlush => code(libc::EIO),
            Fault::FailDirectoryFlush if file.metadata()?.is_dir() => code(libc::EIO),
            Fault::Endless(error) => code(error),
            _ => Linux.flush(file),
        }
    }
}

fn is_direct(file: &File) -> bool {
    fcntl_getfl(file).unwrap().contains(OFlags::DIRECT)
}

#[test]
fn a_file_is_that_of_the_safetensors_crate_also_when_system_calls_are_refused() {
    let (directory, path) = files::new_path("x");
    for fault in [Fault::Nothing, Fault::Short, Fault::RefuseDirect, Fault::NoDirect, Fault::NoReserve, Fault::NoInsert]
    {
        for sizes in [&SIZES[..], &[], &[0], &[1], &[4096 - 72]] {
            let tensors = sample(sizes);
            for step in [1, 3, 100] {
                save(&path, &tensors, Box::new(FaultyKernel::new(fault)), step).unwrap();
                assert!(fs::read(&path).unwrap() == expected(&tensors), "{fault:?} {sizes:?} {step}");
            }
            write(&path, &tensors, Box::new(FaultyKernel::new(fault))).unwrap();
            assert_holds(&path, &tensors);
            assert_eq!(names_in(&directory), ["x"], "{fault:?}");
        }
    }
    // A writer adds no padding to a file of one block.
    let tensors = sample(&[3, 0, 1000]);
    write(&path, &tensors, kernel()).unwrap();
    assert!(fs::read(&path).unwrap() == expected(&tensors));
}

/// Checks that the old file is unchanged, no other file exists, and the error contains all of `words`.
fn assert_failed(directory: &TempDir, result: fst::Result<()>, words: &[&str]) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    for word in words {
        assert!(error.to_string().contains(word), "{error}: {word}");
    }
    assert_eq!(names_in(directory), ["x"]);
    assert_eq!(fs::read(directory.path().join("x")).unwrap(), b"old");
    error
}

#[test]
fn a_failed_write_leaves_the_old_file_unchanged() {
    let (directory, path) = files::new_path("x");
    let tensors = sample(&SIZES);
    fs::write(&path, b"old").unwrap();
    // Index of the write that fails: at the start, in the middle and near the end of the file.
    for at in [0, 1, 5, 20] {
        for (error, words) in [(libc::EIO, "os error 5"), (libc::ENOSPC, "os error 28")] {
            let kernel = || Box::new(FaultyKernel::new(Fault::FailWrite(at, error)));
            let saved = save(&path, &tensors, kernel(), 100);
            let failed = assert_failed(&directory, saved, &["/x: ", "byte ", "cannot write", words]);
            // The header is not part of a tensor.
            assert!(failed.position() == Some(0) || failed.to_string().contains("tensor \"t0"), "{failed}");
            let written = write(&path, &tensors, kernel());
            let failed = assert_failed(&directory, written, &["/x: ", "byte ", "cannot write", words]);
            assert!(failed.position().is_some());
        }
    }
    let no_room = save(&path, &tensors, Box::new(FaultyKernel::new(Fault::NoSpace)), 100);
    assert_failed(&directory, no_room, &["/x: ", "cannot reserve", "os error 28"]);
    let not_flushed = save(&path, &tensors, Box::new(FaultyKernel::new(Fault::FailFlush)), 100);
    assert_failed(&directory, not_flushed, &["/x: ", "cannot flush the file", "os error 5"]);
    let not_flushed = write(&path, &tensors, Box::new(FaultyKernel::new(Fault::FailFlush)));
    assert_failed(&directory, not_flushed, &["/x: ", "cannot flush the file"]);
    // A writer reserves more space than it may need.
    write(&path, &tensors, Box::new(FaultyKernel::new(Fault::NoSpace))).unwrap();
    assert_holds(&path, &tensors);
}

#[test]
fn an_error_after_the_rename_says_that_the_file_is_there() {
    let (directory, path) = files::new_path("x");
    let tensors = sample(&SIZES);
    let kernel = || Box::new(FaultyKernel::new(Fault::FailDirectoryFlush));
    let saves: [&dyn Fn() -> fst::Result<()>; 2] =
        [&|| save(&path, &tensors, kernel(), 100), &|| write(&path, &tensors, kernel())];
    for save in saves {
        fs::write(&path, b"old").unwrap();
        let error = save().unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        for part in ["/x: ", "the new file is complete and has this name", "power failure", "os error 5"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_holds(&path, &tensors);
        assert_eq!(names_in(&directory), ["x"]);
    }
}

#[test]
fn calls_that_are_repeated_for_ever_end_with_the_check() {
    let (directory, path) = files::new_path("x");
    for error in [libc::EINTR, libc::EAGAIN] {
        let output = || OutputFile::create(&path, Box::new(FaultyKernel::new(Fault::Endless(error)))).unwrap();
        let check = || files::fails_after(3);
        let results = [
            output().data().write(b"abc", 0, &check()),
            output().data().reserve(4096, &check()),
            output().data().shift(0, 4096, 4096, &mut [0; 4096], &check()),
            output().publish(0, &check()),
        ];
        for result in results {
            assert_eq!(result.unwrap_err().kind(), Kind::Interrupted);
        }
        // The threads of a writer repeat their calls until it is dropped.
        let output = OutputFile::create(&path, Box::new(FaultyKernel::new(Fault::EndlessWrites(error)))).unwrap();
        let mut writer = Writer::begin(output, None, None, &tight()).unwrap();
        append(&mut writer, 10_000).unwrap();
        drop(writer);
        assert!(names_in(&directory).is_empty());
    }
}

#[test]
fn a_failed_writer_repeats_its_error_and_leaves_no_file() {
    let (directory, path) = files::new_path("x");
    fs::write(&path, b"old").unwrap();
    let kernel = Box::new(FaultyKernel::new(Fault::FailWrite(2, libc::EIO)));
    // With several threads, the tensor could be written to its end before the failed write is noted.
    let options = Options { threads: 1, ..tight() };
    let mut writer = Writer::begin(OutputFile::create(&path, kernel).unwrap(), None, None, &options).unwrap();
    let error = append(&mut writer, 500_000).unwrap_err();
    assert!(error.to_string().contains("tensor \"a\""), "{error}");
    assert_eq!(writer.add(tensor("b", 0)).unwrap_err(), error);
    assert_eq!(assert_failed(&directory, writer.finish(), &[]), error);
}

/// Kernel of a file system without hard links that cannot flush directories.
struct WithoutLinks;

impl FileKernel for WithoutLinks {
    fn link(&self, _: &Path, _: BorrowedFd<'_>, _: &OsStr) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
    fn flush(&self, _: &File) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

#[test]
fn a_link_replaces_a_file_also_without_hard_links() {
    let kernels: [&dyn FileKernel; 2] = [&Linux, &WithoutLinks];
    for kernel in kernels {
        let directory = TempDir::new().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("old"), "old").unwrap();
        symlink("old", at("link")).unwrap();
        fs::write(at("new"), "new").unwrap();
        atomic_file::link(&at("new"), &at("link"), kernel, &|| Ok(())).unwrap();
        assert_eq!(fs::read(at("old")).unwrap(), b"new");
        assert!(at("link").is_symlink());
        fs::write(at("new"), "new").unwrap();
        let error = atomic_file::link(&at("new"), Path::new("/dev/null"), kernel, &|| Ok(())).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        assert_eq!(names_in(&directory).len(), 3);
    }
}

#[test]
fn symbolic_links_are_followed() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("far")).unwrap();
    symlink("far/file", at("link")).unwrap();
    symlink("link", at("link to the link")).unwrap();
    let tensors = sample(&[9]);
    for _ in 0..2 {
        save(&at("link to the link"), &tensors, kernel(), 1).unwrap();
        assert!(at("link to the link").is_symlink() && at("link").is_symlink());
        assert_holds(&at("far/file"), &tensors);
    }
    symlink("b", at("a")).unwrap();
    symlink("a", at("b")).unwrap();
    assert_eq!(save(&at("a"), &tensors, kernel(), 1).unwrap_err().kind(), Kind::Io);
}

#[test]
fn paths_that_cannot_be_files_are_rejected() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    let kind = |path: &Path| save(path, &sample(&[9]), kernel(), 1).unwrap_err().kind();
    assert_eq!(kind(directory.path()), Kind::IsADirectory);
    assert_eq!(kind(&at("missing/x")), Kind::FileNotFound);
    assert_eq!(kind(Path::new("/dev/null")), Kind::InvalidArgument);
    assert_eq!(kind(Path::new("s3://bucket/x")), Kind::InvalidArgument);
    assert_eq!(kind(Path::new("..")), Kind::InvalidArgument);
    assert_eq!(kind(Path::new("")), Kind::InvalidArgument);
    assert_eq!(kind(&at("a\0b")), Kind::InvalidArgument);
    // The temporary name of a file with the longest possible name is truncated.
    let longest = at(&"n".repeat(255));
    save(&longest, &sample(&[9]), kernel(), 1).unwrap();
    assert_eq!(names_in(&directory).len(), 1);
}
