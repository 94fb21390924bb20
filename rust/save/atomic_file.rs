//! Output file that appears at its path atomically. Bytes go to a file without a name or with a temporary name, past the
//! page cache if the file system supports direct I/O, and are flushed before the file is renamed.

use super::direct_file::{DirectFile, flush};
use super::file_kernel::{FileKernel, Linux};
use super::temp_file::{self, Target, TempFile};
use crate::error::{Error, Result};
use crate::num::to_u64;
use crate::os::retry::Check;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

pub use super::direct_file::ALIGNMENT;

/// Message of the only errors after which the new file is at its path.
const NOT_FLUSHED: &str = "the new file is complete and has this name, but a power failure may still undo its rename, \
                           because the directory cannot be flushed";

/// Message of a rename that the file system refused.
const NOT_RENAMED: &str = "cannot give the complete new file its name, so a file that was there is unchanged; check the \
                           permissions of the directory, or save to a file system that renames files";

/// File that is being written. Dropping it before it is published leaves no file behind.
pub struct OutputFile {
    data: DirectFile,
    temp_file: TempFile,
}

impl OutputFile {
    /// Creates an empty file that [`publish`](OutputFile::publish) renames to `path`.
    ///
    /// # Errors
    /// `file-not-found`, `permission-denied`, `is-a-directory` and `io` from the file system; `invalid-argument` if
    /// `path` cannot be the path of a file.
    pub fn create(path: &Path, kernel: Box<dyn FileKernel>) -> Result<OutputFile> {
        OutputFile::create_like(path, None, kernel)
    }

    /// Creates a file like [`create`](OutputFile::create). If no file is at `path`, the new one gets the owner and
    /// permissions of `model`, if that exists.
    pub fn create_like(path: &Path, model: Option<&Path>, kernel: Box<dyn FileKernel>) -> Result<OutputFile> {
        let temp_file = TempFile::create(path, model)?;
        let data = DirectFile::new(path, Arc::clone(&temp_file.file), kernel);
        Ok(OutputFile { data, temp_file })
    }

    /// Returns the file, for writes.
    pub fn data(&self) -> &DirectFile {
        &self.data
    }

    /// Truncates the file to `length` bytes, flushes it to the disk, and renames it to its path.
    ///
    /// # Errors
    /// `io`, with an existing file at the path unchanged, unless the message says that the new file has replaced it; that
    /// of `check`, which is called before a call is repeated.
    pub fn publish(self, length: u64, check: Check<'_>) -> Result<()> {
        let OutputFile { data, temp_file } = self;
        data.set_length(length)?;
        data.flush(check)?;
        // The temporary file is closed before it is renamed.
        let (path, kernel) = data.close();
        let failed = |doing: &'static str| {
            let path = &path;
            move |error: io::Error| Error::from_io(error, path, doing)
        };
        let directory = temp_file.open_directory().map_err(failed("cannot open the directory"))?;
        temp_file.publish(&*kernel).map_err(failed(NOT_RENAMED))?;
        flush_directory(&directory, &path, NOT_FLUSHED, &*kernel, check)
    }
}

/// Creates a file of `bytes` bytes, whose content is unspecified, for [`DirectFile::open`]. It gets the owner and
/// permissions of `model`, if that is given and exists.
///
/// # Errors
/// `io` if a file is at `path`, or if the disk has too little space; the errors of creating a file; the error of
/// `check`, which is called before a call is repeated.
pub fn create_sized(path: &Path, bytes: u64, model: Option<&Path>, check: Check<'_>) -> Result<()> {
    let file = Arc::new(temp_file::create_new(path, model)?);
    let file = DirectFile::new(path, file, Box::new(Linux));
    let sized = file.reserve(bytes.next_multiple_of(to_u64(ALIGNMENT)), check).and_then(|()| file.set_length(bytes));
    // Some file systems refuse to remove an open file.
    drop(file);
    sized.map_err(|error| temp_file::remove(path, error))
}

/// Checks that a save can create or replace the file at `path`.
pub fn check_target(path: &Path) -> Result<()> {
    Target::open(path).map(drop)
}

/// Gives the complete file `source` the name `path`, too, atomically replacing an existing file, and flushes the
/// directory. On file systems without hard links, renames `source`.
pub fn link(source: &Path, path: &Path, kernel: &dyn FileKernel, check: Check<'_>) -> Result<()> {
    let target = Target::open(path)?;
    let linked = target.link(source, kernel).and_then(|()| target.open_directory());
    let directory = linked.map_err(|error| Error::from_io(error, path, "cannot give the file its name"))?;
    flush_directory(&directory, path, NOT_FLUSHED, kernel, check)
}

/// Flushes a directory in which files have been given their names. An error has `path` and the message `not_flushed`.
pub(super) fn flush_directory(
    directory: &File,
    path: &Path,
    not_flushed: &'static str,
    kernel: &dyn FileKernel,
    check: Check<'_>,
) -> Result<()> {
    match flush(directory, kernel, check) {
        Err(interruption) => Err(Error::new(interruption.kind(), not_flushed).at(path)),
        Ok(flushed) => flushed.map_err(|error| Error::from_io(error, path, not_flushed)),
    }
}
