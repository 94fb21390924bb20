//! Path or URL of a checkpoint, and the files beside it.

use super::names::{NameOfSave, SUFFIX, shard_stem};
use super::remove::remove_file;
use super::stale::{self, names_in, names_in_index, remove_stale};
use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use crate::save::output;
use crate::source::files::{check_local, url_of};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Path or URL of a checkpoint, from which the names of its files derive.
pub(super) struct CheckpointPath {
    pub(super) path: PathBuf,
    pub(super) is_remote: bool,
    /// Name of the checkpoint, and the same without its suffix.
    pub(super) name: String,
    pub(super) stem: String,
    /// Name of the index.
    pub(super) index: String,
}

impl CheckpointPath {
    /// # Errors
    /// `invalid-argument` if the path does not end in `.safetensors`; the errors of [`output::check_target`].
    pub(super) fn new(path: &Path) -> Result<CheckpointPath> {
        let is_remote = url_of(path)?.is_some();
        let path = if is_remote { path.to_path_buf() } else { check_local(path)? };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let Some(stem) = name.strip_suffix(SUFFIX).map(str::to_owned) else {
            let message = format!("the names of shards must end in {SUFFIX}; give a path that ends in it");
            return Err(Error::new(Kind::InvalidArgument, message).at(output::shown(&path)?));
        };
        output::check_target(&path)?;
        Ok(CheckpointPath { path, is_remote, index: format!("{name}.index.json"), name, stem })
    }

    /// Returns the path or URL of a file of the checkpoint.
    pub(super) fn beside(&self, name: &str) -> PathBuf {
        match self.path.to_str().filter(|_| self.is_remote).and_then(|url| url.rsplit_once('/')) {
            Some((directory, _)) => PathBuf::from(format!("{directory}/{name}")),
            None => self.path.with_file_name(name),
        }
    }

    pub(super) fn directory(&self) -> PathBuf {
        self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
    }

    /// Returns all names in the directory or prefix, and the names of the files of older checkpoints, without their index.
    /// Removes files that killed saves have left before.
    pub(super) fn list(&self, check: Check<'_>) -> Result<(BTreeSet<String>, Vec<String>)> {
        let (present, named) = if self.is_remote {
            (output::names_beside(&self.path, check)?.into_iter().collect(), BTreeSet::new())
        } else {
            remove_stale(&self.directory(), Some(&self.stem), stale::AGE, check)?;
            let named = names_in_index(&self.beside(&self.index), check);
            (names_in(&self.directory())?, named.unwrap_or_default().files)
        };
        let old = present.iter().filter(|name| self.is_of_checkpoint(name, &named)).cloned().collect();
        Ok((present, old))
    }

    /// Returns whether a name belongs to a file of this checkpoint: a single file, a shard of any save, or a file with a
    /// token, which must be named by the index of a directory.
    fn is_of_checkpoint(&self, name: &str, named: &BTreeSet<String>) -> bool {
        let has_token = NameOfSave::of_file(name).is_some_and(|save| save.stem == self.stem);
        name == self.name
            || shard_stem(name) == Some(&*self.stem)
            || (has_token && (self.is_remote || named.contains(name)))
    }

    /// Removes a file or an object, which need not exist.
    pub(super) fn remove(&self, name: &str, check: Check<'_>) -> Result<()> {
        let path = self.beside(name);
        if self.is_remote {
            return output::remove(&path, check);
        }
        remove_file(&path).map(drop)
    }
}
