//! Saves of tensors that are all known at the start.

use super::calls::{answer, encode, parse, unknown};
use super::encryption_key::EncryptionKey;
use super::ffi;
use super::guard::{guard, guard_with_log};
use super::tensor::{device_stream, metadata_of, new_tensor};
use crate::device::Scratch;
use crate::digest::Hash;
use crate::error::{Error, Kind, Result};
use crate::format::layout::{Layout, Tensor};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::memory;
use crate::save::Extent;
use crate::save::checkpoint::CheckpointSave;
use crate::save::file_kernel::Linux;
use crate::save::file_save::{self, FileSave};
use crate::save::memory::Mapped;
use crate::save::output;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Safetensors file of a save or a writer.
pub(super) struct NewFile(pub(super) file_save::NewFile);

/// Describes a new file. It gets the permissions of `permissions_from`, unless that is empty, if none is at `path`.
pub(super) fn new_file(
    path: &str,
    permissions_from: &str,
    metadata: &[ffi::MetadataEntry],
    has_metadata: bool,
) -> Box<NewFile> {
    Box::new(NewFile(file_save::NewFile {
        path: PathBuf::from(path),
        model: path_of(permissions_from).map(Path::to_path_buf),
        metadata: metadata_of(metadata, has_metadata),
        key: None,
    }))
}

impl NewFile {
    pub(super) fn encrypt_with(&mut self, key: &EncryptionKey) {
        self.0.key = Some(key.key().clone());
    }
}

/// Copies bytes of a tensor in a mapped file.
///
/// # Safety
/// The bytes at `address` are mapped, though the file may have become shorter, and nothing writes to them.
pub(super) unsafe fn read_mapped(tensor: &str, address: u64, into: &mut [u8]) -> Result<()> {
    // SAFETY: the caller's promise is the same.
    guard(|| unsafe { memory::read(address, into) }.map_err(|_| Mapped::gone().tensor(tensor)))
}

/// Save in progress.
pub(super) struct AnySave(FileSave);

/// Checks all tensors and begins their file. No file exists at its path until [`finish_save`].
pub(super) fn begin_save(
    file: &NewFile,
    tensors: &[ffi::NewTensor],
    streams: &[ffi::DeviceStream],
) -> Result<ffi::NewSave> {
    guard_with_log(|| {
        let shown = output::shown(&file.0.path)?;
        let tensors = new_tensors(tensors).map_err(|error| error.at(shown))?;
        let streams = streams.iter().map(device_stream).collect::<Result<_>>()?;
        let save = FileSave::begin(&file.0, tensors, streams, &Options::from_env()?)?;
        Ok(ffi::NewSave { order: save.order(), save: Box::new(AnySave(save)) })
    })
}

impl AnySave {
    /// Returns, for each device, how much scratch memory makes it faster to append these extents, in bytes.
    pub(super) fn scratch_bytes(&self, extents: &[ffi::Extent]) -> Vec<u64> {
        self.0.scratch_bytes(&decode_extents(extents)).into_iter().map(to_u64).collect()
    }

    /// Appends the next bytes of the tensors. `scratch` has memory of each device, or less or none of it.
    ///
    /// # Safety
    /// The caller meets the conditions of [`FileSave::append`].
    pub(super) unsafe fn append(&mut self, extents: &[ffi::Extent], scratch: &[ffi::MemoryRange]) -> Result<()> {
        let decode = |&ffi::MemoryRange { address, bytes }: &ffi::MemoryRange| Scratch { address, bytes };
        let scratch: Vec<Scratch> = scratch.iter().map(decode).collect();
        // SAFETY: the caller's promise is the same.
        guard(|| unsafe { self.0.append(&decode_extents(extents), &scratch) })
    }
}

pub(super) fn decode_extents(extents: &[ffi::Extent]) -> Vec<Extent> {
    let decode = |&ffi::Extent { device, address, bytes }: &ffi::Extent| Extent { device, address, length: bytes };
    extents.iter().map(decode).collect()
}

pub(super) fn finish_save(save: Box<AnySave>) -> Result<()> {
    guard(|| save.0.finish())
}

/// Save of a checkpoint in several files, once it has begun.
pub(super) struct SavedFiles(OnceLock<CheckpointSave>);

pub(super) fn saved_files() -> Box<SavedFiles> {
    Box::new(SavedFiles(OnceLock::new()))
}

impl SavedFiles {
    /// Calls a method of the save. Requests and results are in JSON.
    pub(super) fn call(&self, method: &str, request: &str) -> Result<String> {
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message);
        let begun = || self.0.get().ok_or_else(|| invalid("the save has not begun"));
        answer(|check| match method {
            "begin" => {
                let save = CheckpointSave::begin(&parse(request)?, || Box::new(Linux), check)?;
                let names = save.names();
                self.0.set(save).map_err(|_| invalid("the save has begun already"))?;
                encode(&names)
            }
            "create" => encode(&begun()?.create(&parse::<Vec<u64>>(request)?, check)?),
            "commit" => encode(&begun()?.commit(&parse(request)?, check)?),
            "abandon" => encode(&self.0.get().map(CheckpointSave::abandon)),
            _ => Err(unknown(method)),
        })
    }
}

/// Returns the path that a text names, or `None` if it is empty.
pub(super) fn path_of(text: &str) -> Option<&Path> {
    Some(Path::new(text)).filter(|_| !text.is_empty())
}

/// Layout of a file in memory.
pub(super) struct FileLayout(Layout);

/// Checks all tensors and lays out their file.
pub(super) fn lay_out_file(
    tensors: &[ffi::NewTensor],
    metadata: &[ffi::MetadataEntry],
    has_metadata: bool,
) -> Result<ffi::SerializedFile> {
    guard(|| {
        let layout = Layout::new(&new_tensors(tensors)?, &metadata_of(metadata, has_metadata))?;
        let (order, bytes) = (layout.order().to_vec(), layout.file_bytes());
        Ok(ffi::SerializedFile { layout: Box::new(FileLayout(layout)), order, bytes })
    })
}

impl FileLayout {
    /// Writes the header of a file whose data are complete, with the requested digests.
    pub(super) fn seal(&mut self, file: &mut [u8]) -> Result<()> {
        guard(|| {
            if let Some(algorithm) = self.0.digests() {
                let bytes =
                    |range: &Range<u64>| file.get(to_usize(range.start)..to_usize(range.end)).unwrap_or_default();
                let digest = |range: &Range<u64>| {
                    let hash = Hash::with_groups(algorithm, range.end - range.start);
                    hash.add(0, bytes(range), &|| Ok(()))?;
                    hash.finish()
                };
                let digests = self.0.ranges().map(digest).collect::<Result<Vec<_>>>()?;
                self.0.seal(&digests)?;
            }
            for (byte, &sealed) in file.iter_mut().zip(self.0.header()) {
                *byte = sealed;
            }
            Ok(())
        })
    }
}

fn new_tensors(tensors: &[ffi::NewTensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(new_tensor).collect()
}
