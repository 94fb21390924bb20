//! Output of a save: a local file, or an object of a remote store. Both appear whole, with the last call.
//!
//! Several processes may write one output. One of them creates it, and completes or removes it.

use super::atomic_file::{self, ALIGNMENT, OutputFile};
use super::direct_file::DirectFile;
use super::file_kernel::Linux;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::retry::Check;
use crate::remote::find::location::Location;
use crate::remote::transfer::limits::Parts;
use crate::remote::transfer::upload::{self, Upload};
use crate::source::files::{local_path, url_of};
use std::path::{Path, PathBuf};

/// File or object that is being written. Dropping it before it is published leaves nothing behind, unless it is shared.
#[allow(clippy::large_enum_variant, reason = "without the feature remote, an object has no size")]
pub enum Output {
    /// Local file that appears at its path atomically.
    File(OutputFile),
    /// Local file that exists and has its length, and that several processes write.
    Shared(DirectFile),
    /// Object, which is sent in parts of these sizes, by several processes if the upload is shared.
    Object(Upload, Parts),
}

impl From<OutputFile> for Output {
    fn from(file: OutputFile) -> Output {
        Output::File(file)
    }
}

impl Output {
    /// Begins a new file or object. A file gets the owner and permissions of `model` if none is at `path`.
    pub fn open(path: &Path, model: Option<&Path>) -> Result<Output> {
        Ok(match url_of(path)? {
            None => Output::File(OutputFile::create_like(path, model, Box::new(Linux))?),
            Some(location) => Output::Object(Upload::open(&location)?, Parts::growing(0)),
        })
    }

    /// Opens what [`create_shared`] has created, given the id that it returned and the size of the parts of an object.
    pub fn join(path: &Path, upload: &str, part_bytes: u64, check: Check<'_>) -> Result<Output> {
        Ok(match url_of(path)? {
            None => Output::Shared(DirectFile::open(&local_path(path)?, Box::new(Linux), check)?),
            Some(location) => {
                Output::Object(Upload::join(&location, upload.to_owned())?, Parts::of_size(to_usize(part_bytes)))
            }
        })
    }

    /// Returns the file, or else the object.
    fn target(&self) -> std::result::Result<&DirectFile, (&Upload, &Parts)> {
        match self {
            Output::File(file) => Ok(file.data()),
            Output::Shared(file) => Ok(file),
            Output::Object(upload, parts) => Err((upload, parts)),
        }
    }

    /// Returns whether this is an object.
    pub fn is_object(&self) -> bool {
        self.target().is_err()
    }

    /// Returns the path as the caller passed it, or the URL without what may be secret.
    pub fn path(&self) -> &Path {
        match self.target() {
            Ok(file) => file.path(),
            Err((upload, _)) => upload.path(),
        }
    }

    /// Prepares for a length in bytes: reserves disk space, or begins an upload in parts if one request is too small.
    pub fn prepare(&mut self, length: u64, options: &Options, check: Check<'_>) -> Result<()> {
        if let Output::Object(upload, parts) = self {
            *parts = Parts::of_length(length, options.request_bytes);
            return if length > to_u64(parts.first_bytes()) { upload.begin(Some(length), check) } else { Ok(()) };
        }
        let blocks = length.checked_next_multiple_of(to_u64(ALIGNMENT));
        self.reserve(blocks.ok_or_else(|| too_long(self.path()))?, check)
    }

    /// Prepares for an unknown length.
    pub fn prepare_growing(&mut self, options: &Options) {
        if let Output::Object(_, parts) = self {
            *parts = Parts::growing(options.request_bytes);
        }
    }

    /// Begins an upload in parts of an unknown length, since one request is too small.
    pub fn begin_parts(&self, check: Check<'_>) -> Result<()> {
        self.target().err().map_or(Ok(()), |(upload, _)| upload.begin(None, check))
    }

    /// Returns the alignment of writes in bytes. Only the last one ends elsewhere.
    pub fn alignment(&self) -> usize {
        self.target().err().map_or(ALIGNMENT, |(_, parts)| parts.first_bytes())
    }

    /// Returns the number of bytes that the last write takes for its `length` bytes. Further ones are removed from a file.
    pub fn last_bytes(&self, length: usize) -> usize {
        if self.target().is_ok_and(DirectFile::is_direct) { length.next_multiple_of(ALIGNMENT) } else { length }
    }

    /// Returns the size of the part of an object that has the byte at `offset`, or `None` for a file.
    ///
    /// # Errors
    /// `invalid-argument` if no object is this long.
    pub fn part_bytes(&self, offset: u64) -> Result<Option<usize>> {
        let Err((upload, parts)) = self.target() else { return Ok(None) };
        parts.at(offset).map(|(_, bytes)| Some(bytes)).ok_or_else(|| too_long(upload.path()))
    }

    /// Reserves disk space for a file of `bytes` bytes.
    pub fn reserve(&self, bytes: u64, check: Check<'_>) -> Result<()> {
        self.target().map_or(Ok(()), |file| file.reserve(bytes, check))
    }

    /// Writes the first `length` bytes of `memory` at `offset`. Returns the memory, unless an object needs it longer.
    pub fn write<M>(&self, memory: M, length: usize, offset: u64, check: Check<'_>) -> Result<Option<M>>
    where
        M: AsRef<[u8]> + Send + 'static,
    {
        match self.target() {
            Ok(file) => {
                file.write(memory.as_ref().get(..length).unwrap_or_default(), offset, check)?;
                Ok(Some(memory))
            }
            Err((upload, parts)) => {
                let (index, _) = parts.at(offset).ok_or_else(|| too_long(upload.path()))?;
                upload.put(index, offset, memory, length, check)
            }
        }
    }

    /// Moves bytes towards the end: of a file through `buffer`, of an object in pieces of `distance` bytes.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, buffer: &mut [u8], check: Check<'_>) -> Result<()> {
        match self.target() {
            Ok(file) => file.shift(begin, length, distance, buffer, check),
            Err((upload, _)) => upload.shift(begin, length, distance, check),
        }
    }

    /// Gives the complete file or object its name, replacing an older one.
    pub fn publish(self, length: u64, check: Check<'_>) -> Result<()> {
        match self {
            Output::File(file) => file.publish(length, check),
            Output::Object(upload, _) => upload.finish(check).map_err(|error| upload.abandon(error)),
            Output::Shared(file) => Err(Error::new(Kind::Internal, "the file is shared").at(file.path())),
        }
    }

    /// Ends the part of this process in a shared file or object: sets the length of a file to `end`, if this process wrote
    /// its end, and flushes it. Returns the indices and the ids of the parts of an object.
    pub fn leave(&self, end: Option<u64>, check: Check<'_>) -> Result<Vec<(usize, String)>> {
        match self.target() {
            Ok(file) => {
                end.map_or(Ok(()), |end| file.set_length(end))?;
                file.flush(check).map(|()| Vec::new())
            }
            Err((upload, _)) => Ok(upload.sent_parts()),
        }
    }

    /// Ends the output because of an error. Returns the error, which says so if parts of an upload remain.
    pub fn abandon(&self, error: Error) -> Error {
        match self.target() {
            Ok(_) => error,
            Err((upload, _)) => upload.abandon(error),
        }
    }
}

/// Creates a file of this length, or begins an upload, for [`Output::join`] in several processes. Returns the id of the
/// upload, or an empty text. A file gets the owner and permissions of `model`.
pub fn create_shared(path: &Path, bytes: u64, model: Option<&Path>, check: Check<'_>) -> Result<String> {
    match url_of(path)? {
        None => atomic_file::create_sized(path, bytes, model, check).map(|()| String::new()),
        Some(location) => Upload::begin_shared(&location, bytes, check),
    }
}

/// Ends a shared upload with the parts of all processes, so that the object appears and replaces an older one.
pub fn complete_shared(url: &Path, upload: String, parts: Vec<(usize, String)>, check: Check<'_>) -> Result<()> {
    Upload::finish_shared(&location_of(url)?, upload, parts, check)
}

/// Drops the parts of a shared upload.
pub fn abort_shared(url: &Path, upload: String) -> Result<()> {
    Upload::abort_shared(&location_of(url)?, upload)
}

/// Returns the size of the parts of an object of at most `bytes` bytes.
pub fn part_bytes(bytes: u64, request_bytes: usize) -> usize {
    Parts::of_length(bytes, request_bytes).first_bytes()
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
pub fn check_target(path: &Path) -> Result<()> {
    match url_of(path)? {
        None => atomic_file::check_target(path),
        Some(location) => Upload::open(&location).map(|_| ()),
    }
}

/// Returns the names of the objects beside the object of a URL.
pub fn names_beside(url: &Path, check: Check<'_>) -> Result<Vec<String>> {
    upload::names_beside(&location_of(url)?, check)
}

/// Removes an object. It need not exist.
pub fn remove(url: &Path, check: Check<'_>) -> Result<()> {
    upload::remove(&location_of(url)?, check)
}

fn location_of(url: &Path) -> Result<Location> {
    url_of(url)?.ok_or_else(|| Error::new(Kind::InvalidArgument, "this is not the URL of an object").at(url))
}
