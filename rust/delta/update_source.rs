//! Source of an update: a whole checkpoint, or a chain of deltas.

use super::chain::{Chain, Delta};
use super::{properties, sparse};
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::error::{Error, Kind, Result};
use crate::load::check;
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::source::Source;
use crate::source::files::{Files, Listing};
use std::sync::Arc;

/// Open source of an update.
pub enum UpdateSource {
    /// Whole checkpoint, and the version that its index states.
    Whole(Arc<Checkpoint>, Option<String>),
    /// Deltas.
    Deltas(Chain),
}

impl UpdateSource {
    /// Opens one checkpoint that all paths are, or a delta at each path, the oldest first. Reads the index at each path
    /// once. Verifies what loads would not verify. Fails with `invalid-argument` if only some of the paths lead to
    /// deltas.
    pub fn open(paths: &[String], options: &OpenOptions, reads: &Options) -> Result<UpdateSource> {
        let (first, others) = paths.split_at_checked(1).unwrap_or((paths, &[]));
        let opened = Checkpoint::open_with(first, options)?;
        let path = first.first().map_or("", String::as_str);
        if has_changes(&opened) {
            let mut deltas = vec![Arc::new(delta_of(path, opened, options, reads)?)];
            for other in others {
                let opened = Checkpoint::open_with(&[other], options)?;
                if !has_changes(&opened) {
                    return Err(mixed(&opened));
                }
                deltas.push(Arc::new(delta_of(other, opened, options, reads)?));
            }
            return Ok(UpdateSource::Deltas(Chain::new(deltas)?));
        }
        let watch = Watch::begin();
        for other in others {
            if Files::resolve(&[other], &|| watch.check())?.listings.iter().any(is_delta) {
                return Err(mixed(&opened));
            }
        }
        let version = match (opened.listings(), others) {
            ([listing], []) => properties::version(&listing.metadata).map(str::to_owned),
            ([], []) => opened.file_metadata(0).and_then(sparse::version_of_whole).cloned(),
            _ => None,
        };
        let checkpoint = if others.is_empty() { opened } else { Checkpoint::open_with(paths, options)? };
        if !others.is_empty() && has_changes(&checkpoint) {
            return Err(mixed(&checkpoint));
        }
        check::check_due(&checkpoint, reads)?;
        Ok(UpdateSource::Whole(Arc::new(checkpoint), version))
    }

    /// Returns the deltas. Fails with `malformed` for a whole checkpoint.
    pub fn deltas(&self) -> Result<&Chain> {
        match self {
            UpdateSource::Deltas(chain) => Ok(chain),
            UpdateSource::Whole(checkpoint, _) => {
                let message = "not a delta, but a full checkpoint: its index has no metadata \"delta_encoding\"";
                Err(Error::new(Kind::Malformed, message).at(shown(checkpoint)))
            }
        }
    }

    /// Iterates over the open files.
    pub fn files(&self) -> impl Iterator<Item = &Source> {
        let (whole, deltas): (_, &[Arc<Delta>]) = match self {
            UpdateSource::Whole(checkpoint, _) => (Some(checkpoint), &[]),
            UpdateSource::Deltas(chain) => (None, chain.deltas()),
        };
        whole.into_iter().chain(deltas.iter().map(|delta| &delta.frames)).flat_map(|checkpoint| checkpoint.sources())
    }
}

/// Returns whether the checkpoint is a delta, or has a sparse patch.
fn has_changes(opened: &Checkpoint) -> bool {
    opened.listings().iter().any(is_delta) || has_patch(opened)
}

fn has_patch(opened: &Checkpoint) -> bool {
    let mut patches = opened.metadata_by_file().filter(|(_, metadata)| sparse::is_patch(metadata));
    patches.any(|(_, metadata)| sparse::version_of_whole(metadata).is_none())
}

fn delta_of(path: &str, opened: Checkpoint, options: &OpenOptions, reads: &Options) -> Result<Delta> {
    match has_patch(&opened) {
        true => Delta::of_patch(path, opened, options, reads),
        false => Delta::of(path, opened, options, reads),
    }
}

fn is_delta(listing: &Listing) -> bool {
    properties::is_delta(&listing.metadata)
}

/// Returns a path of the checkpoint for errors, without secrets.
fn shown(checkpoint: &Checkpoint) -> String {
    let listing = checkpoint.listings().first().map(|listing| listing.path.to_string_lossy().into_owned());
    let file = || checkpoint.sources().next().map(|source| source.path().to_string_lossy().into_owned());
    listing.or_else(file).unwrap_or_default()
}

fn mixed(whole: &Checkpoint) -> Error {
    let message = "is no delta, but other paths are; update with a whole checkpoint first, by itself";
    Error::new(Kind::InvalidArgument, message).at(shown(whole))
}
