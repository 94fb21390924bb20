//! File or object that several processes write. One of them creates it, and completes or removes it.
//!
//! An object is an upload in parts. Each process sends parts, and one of them ends the upload with all.

use super::atomic_file;
use super::direct_file::{ALIGNMENT, DirectFile};
use super::file_kernel::Linux;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::retry::Check;
use crate::remote::location::Location;
use crate::remote::parts::Parts;
use crate::remote::upload::Upload;
use crate::source::files::url_of;
use std::path::Path;

/// Part of an object that a process has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentPart {
    /// Index of the file in the save.
    pub file: usize,
    /// Index of the part.
    pub index: usize,
    /// Name that the service gave it.
    pub id: String,
}

/// File or object of a save by several processes, as one of them has it open.
#[allow(clippy::large_enum_variant, reason = "without the feature remote, an object has no size")]
pub(super) enum SharedOutput {
    /// File, whose length is that of the save.
    File(DirectFile),
    /// Upload in parts of this size in bytes.
    Object(Upload, u64),
}

/// Creates the file or begins the upload. Returns the id of the upload, or an empty text for a file. A file gets the owner
/// and permissions of `model`.
///
/// # Errors
/// Those of [`atomic_file::create_sized`] or of [`Upload::begin_shared`].
pub fn create(path: &Path, bytes: u64, model: Option<&Path>, check: Check<'_>) -> Result<String> {
    match url_of(path)? {
        None => atomic_file::create_sized(path, bytes, model, check).map(|()| String::new()),
        Some(location) => Upload::begin_shared(&location, bytes, check),
    }
}

/// Ends an upload with the parts of all processes, so that the object appears and replaces an older one.
///
/// # Errors
/// Those of [`Upload::finish_shared`].
pub fn complete(url: &Path, upload: String, parts: Vec<(usize, String)>, check: Check<'_>) -> Result<()> {
    Upload::finish_shared(&location_of(url)?, upload, parts, check)
}

/// Drops the parts of an upload.
///
/// # Errors
/// Those of [`Upload::abort_shared`].
pub fn abort(url: &Path, upload: String) -> Result<()> {
    Upload::abort_shared(&location_of(url)?, upload)
}

/// Returns the size of the parts of an object of at most `bytes` bytes.
pub fn part_bytes(bytes: u64, request_bytes: usize) -> usize {
    Parts::of_length(bytes, request_bytes).first_bytes()
}

fn location_of(url: &Path) -> Result<Location> {
    url_of(url)?.ok_or_else(|| Error::new(Kind::Internal, "is not a URL").at(url))
}

impl SharedOutput {
    /// Opens an existing file, or joins an upload.
    ///
    /// # Errors
    /// Those of [`DirectFile::open`] or of [`Upload::join`].
    pub(super) fn open(path: &Path, upload: &str, block_bytes: u64, check: Check<'_>) -> Result<SharedOutput> {
        Ok(match url_of(path)? {
            None => SharedOutput::File(DirectFile::open(path, Box::new(Linux), check)?),
            Some(location) => SharedOutput::Object(Upload::join(&location, upload.to_owned())?, block_bytes),
        })
    }

    /// Returns the path, or the URL without what may be secret.
    pub(super) fn path(&self) -> &Path {
        match self {
            SharedOutput::File(file) => file.path(),
            SharedOutput::Object(upload, _) => upload.path(),
        }
    }

    /// Returns the size of a write of `length` bytes. Only at the end of a file it is larger, for direct writes.
    pub(super) fn padded(&self, length: usize) -> usize {
        match self {
            SharedOutput::File(_) => length.next_multiple_of(ALIGNMENT),
            SharedOutput::Object(..) => length,
        }
    }

    /// Writes the first `length` bytes of `memory` at `offset`: whole blocks of a file, or a part of an object.
    ///
    /// # Errors
    /// Those of [`DirectFile::write`] or of [`Upload::put`].
    pub(super) fn write<M>(&self, memory: M, length: usize, offset: u64, check: Check<'_>) -> Result<()>
    where
        M: AsRef<[u8]> + Send + 'static,
    {
        match self {
            SharedOutput::File(file) => file.write(memory.as_ref().get(..length).unwrap_or_default(), offset, check),
            SharedOutput::Object(upload, part_bytes) => {
                upload.put(to_usize(offset / part_bytes), offset, memory, length, check).map(drop)
            }
        }
    }

    /// Flushes what this process has written to a file, after the length is set if this process wrote its end. Returns the
    /// indices and the ids of the parts of an object.
    ///
    /// # Errors
    /// `io`, `interrupted`.
    pub(super) fn finish(&self, end: Option<u64>, check: Check<'_>) -> Result<Vec<(usize, String)>> {
        match self {
            SharedOutput::File(file) => {
                if let Some(end) = end {
                    file.set_length(end)?;
                }
                file.flush(check)?;
                Ok(Vec::new())
            }
            SharedOutput::Object(upload, _) => Ok(upload.sent_parts()),
        }
    }
}
