//! Deltas that follow each other.

use super::properties::Properties;
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::source::files::Listing;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Open delta.
pub struct Delta {
    /// Path or URL of the index.
    pub path: PathBuf,
    /// Versions, encoding and checksum.
    pub properties: Properties,
    /// Its frames.
    pub frames: Arc<Checkpoint>,
}

/// Place of a frame.
pub struct FramePlace<'a> {
    /// File with the frame.
    pub path: &'a Path,
    /// First byte of the frame in the file.
    pub begin: u64,
    /// Checksum of the tensor after its changes.
    pub checksum: Digest,
}

impl Delta {
    /// Opens a delta, and checks all that its index and its headers state. Reads no frames.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open_with`]; `malformed` if the checkpoint is not a delta, or not a valid one.
    pub fn open(path: &str, options: &OpenOptions) -> Result<Delta> {
        let frames = Checkpoint::open_with(&[path], options)?;
        let none = Listing { path: PathBuf::from(path), ..Listing::default() };
        let Listing { path, metadata, listed, .. } = frames.listings().first().unwrap_or(&none);
        let properties = Properties::read(path, metadata)?;
        if *listed != frames.count() {
            let message = format!(
                "the index lists {listed} tensors, but its files hold {}; the files are not those of one delta",
                frames.count()
            );
            return Err(Error::new(Kind::Malformed, message).at(path));
        }
        let delta = Delta { path: path.clone(), properties, frames: Arc::new(frames) };
        for (file, entry) in delta.frames.entries() {
            delta.place(file, entry)?;
        }
        Ok(delta)
    }

    /// Returns the place of the frame of a tensor, or `None` if the delta does not change the tensor.
    ///
    /// # Errors
    /// `malformed` if the frame has no valid checksum.
    pub fn frame(&self, name: &str) -> Result<Option<FramePlace<'_>>> {
        let Ok((file, entry)) = self.frames.find(name) else { return Ok(None) };
        self.place(file, entry).map(Some)
    }

    fn place<'a>(&'a self, file: usize, entry: Entry<'a>) -> Result<FramePlace<'a>> {
        let path = self.frames.source(file)?.path();
        let malformed =
            |message: String| Error::new(Kind::Malformed, message).at(path).tensor(entry.name).offset(entry.begin);
        if entry.dtype != Dtype::U8 || entry.shape.len() != 1 {
            let message = format!(
                "has dtype {} and shape {:?}; a delta stores a frame as U8 with one dimension",
                entry.dtype, entry.shape
            );
            return Err(malformed(message));
        }
        let algorithm = self.properties.checksum;
        let stated = self.frames.file_metadata(file).and_then(|metadata| metadata.get(entry.name));
        let checksum = stated.and_then(|hex| Digest::from_hex(algorithm, hex)).ok_or_else(|| {
            let is = stated.map_or_else(|| "absent".to_owned(), |hex| format!("{hex:?}"));
            let name = algorithm.name();
            let digits = 2 * algorithm.digest_bytes();
            malformed(format!(
                "its {name} checksum in the metadata of the file is {is}; expected {digits} hexadecimal digits"
            ))
        })?;
        Ok(FramePlace { path, begin: entry.begin, checksum })
    }
}

/// Deltas, the oldest first, of which each changes the version of the one before.
pub struct Chain {
    deltas: Vec<Delta>,
}

impl Chain {
    /// Opens deltas.
    ///
    /// # Errors
    /// Those of [`Delta::open`]; `invalid-argument` if they do not follow each other.
    pub fn open(paths: &[String], options: &OpenOptions) -> Result<Chain> {
        let deltas = paths.iter().map(|path| Delta::open(path, options)).collect::<Result<Vec<_>>>()?;
        if deltas.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "no delta was given; give at least one path"));
        }
        for (before, delta) in deltas.iter().zip(deltas.iter().skip(1)) {
            let (version, base_version) = (&before.properties.version, &delta.properties.base_version);
            if version != base_version {
                let message = format!(
                    "the delta changes version {base_version:?}, but {} before it results in version {version:?}; give \
                     all deltas, the oldest first",
                    before.path.display(),
                );
                return Err(Error::new(Kind::InvalidArgument, message).at(&delta.path));
            }
        }
        Ok(Chain { deltas })
    }

    /// Checks that tensors have the version that the first delta changes.
    ///
    /// # Errors
    /// `version`.
    pub fn check_base(&self, held: Option<&str>) -> Result<()> {
        let Some(first) = self.deltas.first().filter(|first| held != Some(&first.properties.base_version)) else {
            return Ok(());
        };
        let has = held.map_or_else(|| "no version; call set_version".to_owned(), |held| format!("{held:?}"));
        let message = format!(
            "the delta changes version {:?}, but the target has {has}; nothing was written",
            first.properties.base_version,
        );
        Err(Error::new(Kind::Version, message).at(&first.path))
    }

    /// Returns the deltas, the oldest first.
    pub fn deltas(&self) -> &[Delta] {
        &self.deltas
    }

    /// Returns the names of the tensors that change, in the order of the deltas and of the bytes in their files.
    pub fn names(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        let entries = self.deltas.iter().flat_map(|delta| delta.frames.entries());
        entries.map(|(_, entry)| entry.name).filter(|name| seen.insert(*name)).collect()
    }
}
