//! Files of a checkpoint, local or remote.

pub(crate) mod directory;
pub mod files;
pub mod index;
pub mod replaced;

use crate::digest::groups::Groups;
use crate::encryption::chunks::Chunks;
use crate::error::Result;
use crate::os::local_file::LocalFile;
use crate::os::retry::Check;
use crate::remote::find::location::Location;
use crate::remote::transfer::limits::first_bytes;
use crate::remote::transfer::object::{self, Object};
use crate::units::{Unit, Units};
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
    /// Returns the absolute path of a local file, or the URL of an object without what may be secret, as
    /// [`files::absolute`] does.
    pub fn absolute(&self) -> String {
        match self {
            Place::Path(path) => files::absolute(path),
            Place::Url(location) => files::absolute(Path::new(&location.to_string())),
            Place::Opened(object) => files::absolute(object.path()),
        }
    }

    /// Returns the path or URL as a text that [`files::place_of`] reads as the same place. It may be secret.
    pub fn to_text(&self) -> String {
        match self {
            Place::Url(location) => location.secret_url(),
            Place::Opened(object) => object.location().secret_url(),
            Place::Path(path) => path.to_str().map_or_else(|| files::file_url(path), str::to_owned),
        }
    }

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
    /// File or object whose data is decrypted, or compared with hashes, when it is read.
    Units(Arc<UnitSource>),
}

/// File or object whose data is read in units.
#[derive(Debug)]
pub struct UnitSource {
    /// File or object with the bytes as they are stored.
    pub stored: Source,
    /// Protection of its units.
    pub protection: Protection,
}

/// Protection of data that is read in units.
#[derive(Debug)]
pub enum Protection {
    /// Chunks that are encrypted.
    Encrypted(Box<dyn Chunks>),
    /// Groups whose hashes are known.
    Hashed(Arc<Groups>),
}

impl Protection {
    /// Returns the place of each unit.
    pub fn units(&self) -> &Units {
        match self {
            Protection::Encrypted(chunks) => chunks.units(),
            Protection::Hashed(groups) => groups.units(),
        }
    }

    /// Decrypts a unit in place, or compares it with its hash. Fails with `integrity`, with the first byte of the unit.
    pub fn open(&self, unit: &Unit, data: &mut [u8]) -> Result<()> {
        match self {
            Protection::Encrypted(chunks) => chunks.decrypt(unit, data),
            Protection::Hashed(groups) => groups.compare(unit, data),
        }
    }
}

impl Source {
    /// Opens a file for reading.
    pub fn open(place: &Place, check: Check<'_>) -> Result<Source> {
        Source::open_one_of(1, place, check)
    }

    /// Opens one of `count` files of a checkpoint. The more objects there are, the fewer bytes the first request for each
    /// asks for.
    pub fn open_one_of(count: usize, place: &Place, check: Check<'_>) -> Result<Source> {
        Ok(match place {
            Place::Path(path) => Source::File(Arc::new(LocalFile::open(path)?)),
            Place::Url(location) => Source::Object(Arc::new(object::open(location, first_bytes(count), check)?)),
            Place::Opened(object) => Source::Object(Arc::clone(object)),
        })
    }

    /// Returns the path, as the caller gave it, or the URL without what may be secret.
    pub fn path(&self) -> &Path {
        match self {
            Source::File(file) => &file.path,
            Source::Object(object) => object.path(),
            Source::Units(source) => source.stored.path(),
        }
    }

    /// Returns the length in bytes when the file was opened.
    pub fn length(&self) -> u64 {
        match self {
            Source::File(file) => file.length,
            Source::Object(object) => object.length(),
            Source::Units(source) => source.stored.length(),
        }
    }

    /// Returns the file or object with the bytes as they are stored.
    pub fn stored(&self) -> &Source {
        match self {
            Source::File(_) | Source::Object(_) => self,
            Source::Units(source) => &source.stored,
        }
    }

    /// Returns whether the data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Source::Units(source) if matches!(source.protection, Protection::Encrypted(_)))
    }

    /// Returns the size of the units in which the tensor at this byte is read, if it is.
    pub fn unit_bytes(&self, begin: u64) -> Option<u64> {
        match self {
            Source::File(_) | Source::Object(_) => None,
            Source::Units(source) => source.protection.units().unit_bytes(begin),
        }
    }

    /// Returns whether the bytes come from a remote object.
    pub fn is_remote(&self) -> bool {
        matches!(self.stored(), Source::Object(_))
    }

    /// Returns the local file with the bytes of the tensors, or `None` for an object or a file that is read in units.
    pub fn file(&self) -> Option<&Arc<LocalFile>> {
        match self {
            Source::File(file) => Some(file),
            Source::Object(_) | Source::Units(_) => None,
        }
    }

    /// Returns the local file with all bytes as they are stored: the file itself, or the copy of an object in the cache.
    pub fn local_bytes(&self) -> Option<&Arc<LocalFile>> {
        match self {
            Source::File(file) => Some(file),
            Source::Object(object) => object.copy(),
            Source::Units(source) => source.stored.local_bytes(),
        }
    }

    /// Fills each buffer with the bytes from its offset, as they are stored. Of an object, buffers with short gaps between
    /// them share a request.
    pub fn read_all<'a>(&self, mut reads: impl Iterator<Item = (u64, &'a mut [u8])>, check: Check<'_>) -> Result<()> {
        match self.stored() {
            Source::Object(object) => object.read(reads, check),
            stored => reads.try_for_each(|(offset, into)| stored.read(offset, into, check)),
        }
    }

    /// Fills `into` with the bytes from `offset`, as they are stored. Fails with `io` if reading fails, `malformed` if
    /// a local file has become shorter.
    pub fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        match self {
            Source::Object(object) => object.read([(offset, into)], check),
            Source::File(file) => file.read(offset, into, check),
            Source::Units(source) => source.stored.read(offset, into, check),
        }
    }
}
