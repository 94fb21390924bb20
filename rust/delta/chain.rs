//! Deltas that follow each other.

use super::properties::Properties;
use crate::checkpoint::selection::Selection;
use crate::checkpoint::verify::{Compared, Verify};
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::load::check;
use crate::options::Options;
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
    /// Reads the delta at a path from its checkpoint, and checks all that its index and its headers state. If the data
    /// are to be verified, reads all frames and compares what a load of them would compare, so that none is decoded
    /// before. Fails with `malformed` if the checkpoint is not a delta, or not a valid one.
    pub(super) fn of(path: &str, frames: Checkpoint, options: &OpenOptions, reads: &Options) -> Result<Delta> {
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
        if options.verify.verify != Verify::Nothing {
            delta.verify(reads)?;
        }
        Ok(delta)
    }

    fn verify(&self, reads: &Options) -> Result<()> {
        let selection = Selection::all(&self.frames)?;
        let names = self.frames.without_digests(selection.regions())?;
        if !names.is_empty() {
            tracing::warn!(?names, "the digests do not cover these frames of a delta");
        }
        check::check_part(&self.frames, Compared::All, 0, 1, reads)?;
        self.frames.set_verified(Compared::All);
        Ok(())
    }

    /// Returns the place of the frame of a tensor, or `None` if the delta does not change the tensor. Fails with
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
#[derive(Clone)]
pub struct Chain {
    deltas: Vec<Arc<Delta>>,
}

impl Chain {
    /// Joins deltas, the oldest first. Fails with `invalid-argument` if they do not follow each other.
    pub fn new(deltas: Vec<Arc<Delta>>) -> Result<Chain> {
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
    pub fn deltas(&self) -> &[Arc<Delta>] {
        &self.deltas
    }

    /// Returns the names of the tensors that change, in the order of the deltas and of the bytes in their files.
    pub fn names(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        let entries = self.deltas.iter().flat_map(|delta| delta.frames.entries());
        entries.map(|(_, entry)| entry.name).filter(|name| seen.insert(*name)).collect()
    }
}
