//! Files of a checkpoint, local or remote.

mod directory;
pub mod files;
mod index;

use crate::encryption::chunks::Chunks;
use crate::error::Result;
use crate::os::local_file::LocalFile;
use crate::os::retry::Check;
use crate::remote::find;
use crate::remote::location::Location;
use crate::remote::object::{Object, head_bytes};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Location of a file of a checkpoint.
#[derive(Clone, Debug)]
pub enum Place {
    /// Path of a local file.
    Path(PathBuf),
    /// URL of an object.
    Url(Location),
    /// Object that is open already.
    Opened(Arc<Object>),
}

impl Place {
    /// Returns the last part of the path.
    pub fn file_name(&self) -> &[u8] {
        match self {
            Place::Path(path) => path.file_name().unwrap_or_default().as_encoded_bytes(),
            Place::Url(location) => location.file_name().as_bytes(),
            Place::Opened(object) => object.location().file_name().as_bytes(),
        }
    }
}

/// Open file of a checkpoint.
#[derive(Clone, Debug)]
pub enum Source {
    /// Local file.
    File(Arc<LocalFile>),
    /// Remote object.
    Object(Arc<Object>),
    /// File or object with encrypted data.
    Encrypted(Arc<EncryptedSource>),
}

/// File or object with encrypted data, and the key to decrypt it.
#[derive(Debug)]
pub struct EncryptedSource {
    /// File or object with the encrypted bytes.
    pub stored: Source,
    /// Its chunks.
    pub chunks: Chunks,
}

impl Source {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of the file system or of the store, with the path or URL; that of `check`.
    pub fn open(place: &Place, check: Check<'_>) -> Result<Source> {
        Source::open_one_of(1, place, check)
    }

    /// Opens one of `count` files of a checkpoint. The more objects there are, the fewer bytes the first request for each
    /// asks for.
    ///
    /// # Errors
    /// Those of [`Source::open`].
    pub fn open_one_of(count: usize, place: &Place, check: Check<'_>) -> Result<Source> {
        Ok(match place {
            Place::Path(path) => Source::File(Arc::new(LocalFile::open(path)?)),
            Place::Url(location) => Source::Object(Arc::new(find::open(location, head_bytes(count), check)?)),
            Place::Opened(object) => Source::Object(Arc::clone(object)),
        })
    }

    /// Returns the path, as the caller gave it, or the URL without what may be secret.
    pub fn path(&self) -> &Path {
        match self {
            Source::File(file) => &file.path,
            Source::Object(object) => object.path(),
            Source::Encrypted(encrypted) => encrypted.stored.path(),
        }
    }

    /// Returns the length in bytes when the file was opened.
    pub fn length(&self) -> u64 {
        match self {
            Source::File(file) => file.length,
            Source::Object(object) => object.length(),
            Source::Encrypted(encrypted) => encrypted.stored.length(),
        }
    }

    /// Returns the file or object with the bytes as they are stored.
    pub fn stored(&self) -> &Source {
        match self {
            Source::File(_) | Source::Object(_) => self,
            Source::Encrypted(encrypted) => &encrypted.stored,
        }
    }

    /// Returns whether the data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Source::Encrypted(_))
    }

    /// Returns whether the bytes come from a remote object.
    pub fn is_remote(&self) -> bool {
        matches!(self.stored(), Source::Object(_))
    }

    /// Returns the local file with the bytes of the tensors, or `None` for an object or an encrypted file.
    pub fn file(&self) -> Option<&Arc<LocalFile>> {
        match self {
            Source::File(file) => Some(file),
            Source::Object(_) | Source::Encrypted(_) => None,
        }
    }

    /// Returns the local file with all bytes as they are stored: the file itself, or the copy of an object in the cache.
    pub fn local_bytes(&self) -> Option<&Arc<LocalFile>> {
        match self {
            Source::File(file) => Some(file),
            Source::Object(object) => object.copy(),
            Source::Encrypted(encrypted) => encrypted.stored.local_bytes(),
        }
    }

    /// Fills `into` with the bytes from `offset`, as they are stored.
    ///
    /// # Errors
    /// `io` if reading fails, `malformed` if a local file has become shorter; those of the store; that of `check`.
    pub fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        match self {
            Source::Object(object) => object.read([(offset, into)], check),
            Source::File(file) => file.read(offset, into, check),
            Source::Encrypted(encrypted) => encrypted.stored.read(offset, into, check),
        }
    }
}
