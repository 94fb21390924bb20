//! Output of a save: a local file, or an object of a remote store. Both appear whole, with the last call.

use super::atomic_file::{self, ALIGNMENT, OutputFile};
use super::file_kernel::Linux;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::os::retry::Check;
use crate::remote::location::Location;
use crate::remote::parts::Parts;
use crate::remote::upload::{self, Upload};
use crate::source::files::url_of;
use std::path::{Path, PathBuf};

/// File or object that is being written. Dropping it before it is published leaves nothing behind.
#[allow(clippy::large_enum_variant, reason = "without the feature remote, an object has no size")]
pub enum Output {
    /// Local file.
    File(OutputFile),
    /// Object, which is sent in parts of these sizes.
    Object(Upload, Parts),
}

impl From<OutputFile> for Output {
    fn from(file: OutputFile) -> Output {
        Output::File(file)
    }
}

impl Output {
    /// Begins a new file or object. A file gets the owner and permissions of `model` if none is at `path`.
    ///
    /// # Errors
    /// Those of [`OutputFile::create_like`] or of [`Upload::open`].
    pub fn open(path: &Path, model: Option<&Path>) -> Result<Output> {
        Ok(match url_of(path)? {
            None => Output::File(OutputFile::create_like(path, model, Box::new(Linux))?),
            Some(location) => Output::Object(Upload::open(&location)?, Parts::growing(0)),
        })
    }

    /// Returns the path as the caller passed it, or the URL without what may be secret.
    pub fn path(&self) -> &Path {
        match self {
            Output::File(file) => file.data().path(),
            Output::Object(upload, _) => upload.path(),
        }
    }

    /// Prepares for a length in bytes: reserves disk space, or begins an upload in parts if one request is too small.
    ///
    /// # Errors
    /// Those of [`OutputFile::reserve`] or of [`Upload::begin`].
    pub fn prepare(&mut self, length: u64, options: &Options, check: Check<'_>) -> Result<()> {
        match self {
            Output::File(file) => {
                let blocks = length.checked_next_multiple_of(to_u64(ALIGNMENT));
                file.data().reserve(blocks.ok_or_else(|| too_long(file.data().path()))?, check)
            }
            Output::Object(upload, parts) => {
                *parts = Parts::of_length(length, options.request_bytes);
                if length > to_u64(parts.first_bytes()) { upload.begin(Some(length), check) } else { Ok(()) }
            }
        }
    }

    /// Prepares for an unknown length.
    pub fn prepare_growing(&mut self, options: &Options) {
        if let Output::Object(_, parts) = self {
            *parts = Parts::growing(options.request_bytes);
        }
    }

    /// Begins an upload in parts of an unknown length, since one request is too small.
    ///
    /// # Errors
    /// Those of [`Upload::begin`].
    pub fn begin_parts(&self, check: Check<'_>) -> Result<()> {
        match self {
            Output::File(_) => Ok(()),
            Output::Object(upload, _) => upload.begin(None, check),
        }
    }

    /// Returns the alignment of writes in bytes. Only the last one ends elsewhere.
    pub fn alignment(&self) -> usize {
        match self {
            Output::File(_) => ALIGNMENT,
            Output::Object(_, parts) => parts.first_bytes(),
        }
    }

    /// Returns the number of bytes that the last write takes for its `length` bytes. Further ones are removed from a file.
    pub fn last_bytes(&self, length: usize) -> usize {
        match self {
            Output::File(_) => length.next_multiple_of(ALIGNMENT),
            Output::Object(..) => length,
        }
    }

    /// Returns the size of the part of an object that has the byte at `offset`, or `None` for a file.
    ///
    /// # Errors
    /// `invalid-argument` if no object is this long.
    pub fn part_bytes(&self, offset: u64) -> Result<Option<usize>> {
        match self {
            Output::File(_) => Ok(None),
            Output::Object(upload, parts) => {
                parts.at(offset).map(|(_, bytes)| Some(bytes)).ok_or_else(|| too_long(upload.path()))
            }
        }
    }

    /// Reserves disk space for a file of `bytes` bytes.
    ///
    /// # Errors
    /// Those of [`OutputFile::reserve`].
    pub fn reserve(&self, bytes: u64, check: Check<'_>) -> Result<()> {
        match self {
            Output::File(file) => file.data().reserve(bytes, check),
            Output::Object(..) => Ok(()),
        }
    }

    /// Writes the first `length` bytes of `memory` at `offset`. Returns the memory, unless an object needs it longer.
    ///
    /// # Errors
    /// Those of [`OutputFile::write`] or of [`Upload::put`].
    pub fn write<M>(&self, memory: M, length: usize, offset: u64, check: Check<'_>) -> Result<Option<M>>
    where
        M: AsRef<[u8]> + Send + 'static,
    {
        match self {
            Output::File(file) => {
                file.data().write(memory.as_ref().get(..length).unwrap_or_default(), offset, check)?;
                Ok(Some(memory))
            }
            Output::Object(upload, parts) => {
                let (index, _) = parts.at(offset).ok_or_else(|| too_long(upload.path()))?;
                upload.put(index, offset, memory, length, check)
            }
        }
    }

    /// Moves bytes towards the end: of a file through `buffer`, of an object in pieces of `distance` bytes.
    ///
    /// # Errors
    /// Those of [`OutputFile::shift`] or of [`Upload::shift`].
    pub fn shift(&self, begin: u64, length: u64, distance: u64, buffer: &mut [u8], check: Check<'_>) -> Result<()> {
        match self {
            Output::File(file) => file.data().shift(begin, length, distance, buffer, check),
            Output::Object(upload, _) => upload.shift(begin, length, distance, check),
        }
    }

    /// Gives the complete file or object its name, replacing an older one.
    ///
    /// # Errors
    /// Those of [`OutputFile::publish`] or of [`Upload::finish`].
    pub fn publish(self, length: u64, check: Check<'_>) -> Result<()> {
        match self {
            Output::File(file) => file.publish(length, check),
            Output::Object(upload, _) => upload.finish(check).map_err(|error| upload.abandon(error)),
        }
    }

    /// Ends the output because of an error. Returns the error, which says so if parts of an upload remain.
    pub fn abandon(&self, error: Error) -> Error {
        match self {
            Output::File(_) => error,
            Output::Object(upload, _) => upload.abandon(error),
        }
    }
}

fn too_long(path: &Path) -> Error {
    Error::new(Kind::InvalidArgument, "the file would be too long; save it in shards").at(path)
}

/// Returns a path as errors show it: a URL without what may be secret.
///
/// # Errors
/// `invalid-argument` for a URL with an unknown scheme.
pub fn shown(path: &Path) -> Result<PathBuf> {
    Ok(url_of(path)?.map_or_else(|| path.to_path_buf(), |location| PathBuf::from(location.to_string())))
}

/// Checks that a save can create or replace what is at `path`, as far as this is known without a request.
///
/// # Errors
/// Those of [`atomic_file::check_target`] or of [`Upload::open`].
pub fn check_target(path: &Path) -> Result<()> {
    match url_of(path)? {
        None => atomic_file::check_target(path),
        Some(location) => Upload::open(&location).map(|_| ()),
    }
}

/// Returns the names of the objects beside the object of a URL.
///
/// # Errors
/// Those of [`upload::names_beside`].
pub fn names_beside(url: &Path, check: Check<'_>) -> Result<Vec<String>> {
    upload::names_beside(&location_of(url)?, check)
}

/// Removes an object. It need not exist.
///
/// # Errors
/// Those of [`upload::remove`].
pub fn remove(url: &Path, check: Check<'_>) -> Result<()> {
    upload::remove(&location_of(url)?, check)
}

fn location_of(url: &Path) -> Result<Location> {
    url_of(url)?.ok_or_else(|| Error::new(Kind::InvalidArgument, "this is not the URL of an object").at(url))
}
