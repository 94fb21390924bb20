//! Deltas that follow each other.

use super::properties::Properties;
use super::sparse::{self, Pair};
use crate::checkpoint::selection::Selection;
use crate::checkpoint::verify::{Compared, Verify};
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::load::check;
use crate::num::to_usize;
use crate::options::Options;
use crate::source::files::Listing;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Open delta.
pub struct Delta {
    /// Path or URL of the index.
    pub path: PathBuf,
    /// Versions, encoding and checksum.
    pub properties: Properties,
    /// Its frames, or the positions and values of a sparse patch.
    pub frames: Arc<Checkpoint>,
    /// Positions and values, by the names of the tensors that change. `None` for frames.
    pairs: Option<HashMap<String, Pair>>,
}

/// Place of a frame.
pub struct FramePlace<'a> {
    /// File with the frame.
    pub path: &'a Path,
    /// First byte of the frame in the file.
    pub begin: u64,
    /// Checksum of the tensor after its changes. A sparse patch has none.
    pub checksum: Option<Digest>,
    /// Number of the bytes before the values of a sparse patch.
    pub values_begin: usize,
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
        let delta = Delta { path: path.clone(), properties, frames: Arc::new(frames), pairs: None };
        for (file, entry) in delta.frames.entries() {
            delta.place(file, entry)?;
        }
        delta.verified(options, reads)
    }

    /// Reads the sparse patch at a path, as [`Delta::of`] reads a delta. Fails with `malformed` for several files.
    pub(super) fn of_patch(path: &str, patch: Checkpoint, options: &OpenOptions, reads: &Options) -> Result<Delta> {
        let (Some(metadata), 1) = (patch.file_metadata(0), patch.sources().len()) else {
            let message = "has a sparse patch among several files; give each patch as a file of its own";
            return Err(Error::new(Kind::Malformed, message).at(path));
        };
        let path = patch.source(0)?.path().to_path_buf();
        let properties = sparse::properties(&path, metadata)?;
        let pairs = sparse::pairs(&path, &patch, properties.encoding, metadata)?;
        Delta { path, properties, frames: Arc::new(patch), pairs: Some(pairs) }.verified(options, reads)
    }

    /// Verifies the data, if they are to be verified.
    fn verified(self, options: &OpenOptions, reads: &Options) -> Result<Delta> {
        if options.verify.verify != Verify::Nothing {
            self.verify(reads)?;
        }
        Ok(self)
    }

    fn base_version(&self) -> &str {
        self.properties.base_version.as_deref().unwrap_or_default()
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
        if let Some(pairs) = &self.pairs {
            let Some(pair) = pairs.get(name) else { return Ok(None) };
            let (path, values_begin) = (self.frames.source(pair.file)?.path(), to_usize(pair.positions_bytes));
            return Ok(Some(FramePlace { path, begin: pair.begin, checksum: None, values_begin }));
        }
        let Ok((file, entry)) = self.frames.find(name) else { return Ok(None) };
        self.place(file, entry).map(Some)
    }

    /// Returns the names of the tensors that the delta changes, in the order of the bytes in its files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.frames.entries().filter_map(|(_, entry)| match self.pairs {
            None => Some(entry.name),
            Some(_) => sparse::half(entry.name).filter(|(.., is_positions)| !is_positions).map(|(name, ..)| name),
        })
    }

    /// Returns the names of the stored tensors with the changes of a tensor: of none, of a frame, or of positions and
    /// values.
    pub(super) fn stored(&self, name: &str) -> Vec<String> {
        match &self.pairs {
            None => self.frames.find(name).ok().map(|_| name.to_owned()).into_iter().collect(),
            Some(pairs) => pairs.get(name).map(|pair| pair.names.to_vec()).unwrap_or_default(),
        }
    }

    /// Returns the positions and values of a tensor, if the delta is a sparse patch that changes it.
    pub(super) fn pair(&self, name: &str) -> Option<&Pair> {
        self.pairs.as_ref()?.get(name)
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
        let Some(algorithm) = self.properties.checksum else {
            return Err(malformed("the delta has no checksums".to_owned()));
        };
        let stated = self.frames.file_metadata(file).and_then(|metadata| metadata.get(entry.name));
        let checksum = stated.and_then(|hex| Digest::from_hex(algorithm, hex)).ok_or_else(|| {
            let is = stated.map_or_else(|| "absent".to_owned(), |hex| format!("{hex:?}"));
            let name = algorithm.name();
            let digits = 2 * algorithm.digest_bytes();
            malformed(format!(
                "its {name} checksum in the metadata of the file is {is}; expected {digits} hexadecimal digits"
            ))
        })?;
        Ok(FramePlace { path, begin: entry.begin, checksum: Some(checksum), values_begin: 0 })
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
            let version = &before.properties.version;
            if !delta.properties.fits(Some(version)) {
                let base_version = delta.base_version();
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
        let Some(first) = self.deltas.first().filter(|first| !first.properties.fits(held)) else {
            return Ok(());
        };
        let has = held.map_or_else(|| "no version; call set_version".to_owned(), |held| format!("{held:?}"));
        let message = format!(
            "the delta changes version {:?}, but the target has {has}; nothing was written",
            first.base_version(),
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
        self.deltas.iter().flat_map(|delta| delta.names()).filter(|name| seen.insert(*name)).collect()
    }

    /// Returns the names of the tensors whose last change has no checksum.
    pub fn unverified(&self) -> Vec<&str> {
        let last = |name: &str| self.deltas.iter().rev().find(|delta| !delta.stored(name).is_empty());
        let mut names = self.names();
        names.retain(|name| last(name).is_some_and(|delta| delta.properties.checksum.is_none()));
        names
    }
}
