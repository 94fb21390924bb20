//! Safetensors files for the tests, written by the reference implementation or byte by byte.

use fst::error::Kind;
use fst::os::local_file::LocalFile;
use fst::source::Source;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Page size of the machines that run the tests, in bytes.
pub const PAGE_BYTES: usize = 4 << 10;

/// Returns a new directory, and a path of no file in it.
pub fn new_path(name: &str) -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join(name);
    (directory, path)
}

/// Writes a file with this header and these data bytes, which may be invalid.
pub fn raw(directory: &TempDir, name: &str, json: &str, data: &[u8]) -> PathBuf {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(data);
    let path = directory.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Writes a file of tensors with the crate `safetensors`.
pub fn written(directory: &TempDir, name: &str, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> PathBuf {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let path = directory.path().join(name);
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    path
}

/// Returns bytes that differ from position to position, so that a misplaced one is noticed.
pub fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) as u8).collect()
}

/// Returns the bytes of hexadecimal digits.
pub fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|index| u8::from_str_radix(&text[index..index + 2], 16).unwrap()).collect()
}

pub fn address_of(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

pub fn local_file(path: &Path) -> Arc<LocalFile> {
    Arc::new(LocalFile::open(path).unwrap())
}

pub fn source(path: &Path) -> Source {
    Source::File(local_file(path))
}

/// Drops a file from the page cache, if its file system has one.
pub fn make_cold(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    // SAFETY: advice changes no memory.
    assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
}

/// Returns which pages of a file are cached, from mincore(2).
pub fn cached_pages(path: &Path) -> Vec<bool> {
    let file = File::open(path).unwrap();
    let mapped = memmap2::MmapOptions::new().map_raw_read_only(&file).unwrap();
    let mut pages = vec![0_u8; mapped.len().div_ceil(PAGE_BYTES)];
    // SAFETY: the range is the mapping's, and the buffer has a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(mapped.as_mut_ptr().cast(), mapped.len(), pages.as_mut_ptr()) }, 0);
    pages.into_iter().map(|page| page & 1 == 1).collect()
}

/// Returns how many pages of a file are cached.
pub fn cached_count(path: &Path) -> usize {
    cached_pages(path).into_iter().filter(|page| *page).count()
}

/// Returns a check that fails with `interrupted` from its call with this number on.
pub fn fails_after(calls: usize) -> impl Fn() -> fst::Result<()> {
    let count = std::cell::Cell::new(0);
    move || {
        count.set(count.get() + 1);
        if count.get() < calls { Ok(()) } else { Err(fst::Error::new(Kind::Interrupted, "the test ends")) }
    }
}

/// Changes a bit of a byte of a file, and returns the bytes before.
pub fn damage(path: &Path, offset: u64) -> Vec<u8> {
    let before = std::fs::read(path).unwrap();
    let mut bytes = before.clone();
    bytes[offset as usize] ^= 1;
    std::fs::write(path, bytes).unwrap();
    before
}

/// Returns the offset of the data of a safetensors file.
pub fn data_begin(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// Checks that a result is an error of this kind, and that its text contains all of `expected`.
#[track_caller]
pub fn assert_fails<T>(result: fst::Result<T>, kind: Kind, expected: &[&str]) {
    let error = result.err().unwrap();
    assert_eq!(error.kind(), kind, "{error}");
    for part in expected {
        assert!(error.to_string().contains(part), "{part:?} is not in {error}");
    }
}

/// Bytes that replace others, at any positions.
pub type Damage = Vec<(prop::sample::Index, u8)>;

pub fn any_damage() -> impl Strategy<Value = Damage> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)
}

pub fn apply(damage: &Damage, bytes: &mut [u8]) {
    for (index, byte) in damage {
        bytes[index.index(bytes.len())] = *byte;
    }
}
