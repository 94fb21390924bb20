//! Temporary files that killed saves have left in a directory.
//!
//! The files of a save are stale if its lock is gone or can be taken, and the index does not name them. A save creates its
//! lock first and removes it last. So the index is read after the lock was looked for: the save cannot change it any more.
//!
//! If the index is of a killed save, what that save had still to remove is stale, too: files of the older checkpoint.

use super::lock::try_lock;
use super::names::{NameOfSave, SUFFIX, TEMPORARY_SUFFIX, is_number, shard_stem};
use super::remove::remove_file;
use crate::error::{Kind, Result};
use crate::os::retry::Check;
use crate::source::directory;
use crate::source::files::Files;
use crate::source::index::STATE;
use crate::source::replaced::SAVE_KEY;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time in which a save locks a file that it has created, or renames a link.
pub const AGE: Duration = Duration::from_secs(60);

/// Temporary file that was removed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Its path, as it is shown.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// Removes temporary files that no running save uses: of the checkpoint with this name without its suffix, or of all in the
/// directory. Files that a killed save in shards need not have created must be older than `age`. Where the file system has
/// no locks, the files of a killed save stay.
pub fn remove_stale(directory: &Path, stem: Option<&str>, age: Duration, check: Check<'_>) -> Result<Vec<Removed>> {
    let names = names_in(directory)?;
    let has_letter = |name: &NameOfSave<'_>| !is_number(name.token);
    // The copy of a user may end in a date.
    let of_name = |name| NameOfSave::of_lock(name).or_else(|| NameOfSave::of_file(name).filter(has_letter));
    let saves: BTreeSet<NameOfSave<'_>> = names.iter().filter_map(|name| of_name(name)).collect();
    let mut removed = Vec::new();
    for save in saves.into_iter().filter(|save| stem.is_none_or(|stem| stem == save.stem)) {
        check()?;
        remove_of_save(directory, save, &mut removed, check)?;
    }
    for (file, name) in names.iter().filter_map(|file| Some((file, name_of_new_file(file)?))) {
        let path = directory.join(file);
        let Some(lock) = try_lock(&path).filter(|_| stem.is_none_or(|stem| name.starts_with(stem))) else { continue };
        let is_old = fs::symlink_metadata(&path).is_ok_and(|found| age_of(&found) >= age);
        if is_old || is_of_ended_save(directory, name, &names) {
            remove(path, &mut removed)?;
        }
        drop(lock);
    }
    Ok(removed)
}

/// Returns whether only a save that has ended can have created a file for this name: the save with the token in the name, or
/// else the saves in shards whose locks were there.
fn is_of_ended_save(directory: &Path, name: &str, names: &BTreeSet<String>) -> bool {
    let has_ended = |save: NameOfSave<'_>| {
        let lock = directory.join(save.lock());
        try_lock(&lock).is_some() || fs::symlink_metadata(&lock).is_err()
    };
    if let Some(save) = NameOfSave::of_file(name) {
        return has_ended(save);
    }
    let stem = shard_stem(name).or_else(|| name.strip_suffix(".index.json")?.strip_suffix(SUFFIX));
    let mut saves =
        names.iter().filter_map(|name| NameOfSave::of_lock(name)).filter(|save| Some(save.stem) == stem).peekable();
    saves.peek().is_some() && saves.all(has_ended)
}

/// Removes the files of a save that has ended, and its lock if all of them are gone.
fn remove_of_save(directory: &Path, save: NameOfSave<'_>, removed: &mut Vec<Removed>, check: Check<'_>) -> Result<()> {
    let lock_path = directory.join(save.lock());
    let lock = try_lock(&lock_path);
    if lock.is_none() && fs::symlink_metadata(&lock_path).is_ok() {
        return Ok(());
    }
    let checkpoint = directory.join(format!("{}{SUFFIX}", save.stem));
    let index = directory.join(format!("{}{SUFFIX}.index.json", save.stem));
    let is_known = lock.is_some() || index.exists() || checkpoint.exists();
    let named = names_in_index(&index, check);
    let is_in_place = named.as_ref().is_some_and(|named| named.is_of(save));
    let mut is_kept = false;
    for name in names_in(directory)?.iter().filter(|name| NameOfSave::of_file(name) == Some(save)) {
        // Without a lock, only a name that no program but fst gives is enough. What an unreadable index names is unknown.
        let is_stale = lock.is_some()
            || NameOfSave::of_staged(name).is_some()
            || (is_known && NameOfSave::of_state(name).is_some());
        if is_stale && named.as_ref().is_some_and(|named| !named.files.contains(name)) {
            remove(directory.join(name), removed)?;
        } else {
            is_kept = true;
        }
    }
    if let Some(named) = named.filter(|_| lock.is_some() && is_in_place) {
        remove_older(directory, save, &named.files, removed, check)?;
    }
    // Files that the index names need no lock.
    if lock.is_some() && (is_in_place || !is_kept) {
        // On file systems that do not remove open files, no other process can have removed and replaced this one either.
        remove(lock_path.clone(), removed).or_else(|_| {
            drop(lock);
            remove(lock_path, removed)
        })?;
    }
    Ok(())
}

/// Removes the files that a killed save, whose index is in place, had replaced. Stops as soon as another save runs.
fn remove_older(
    directory: &Path,
    save: NameOfSave<'_>,
    named: &BTreeSet<String>,
    removed: &mut Vec<Removed>,
    check: Check<'_>,
) -> Result<()> {
    let file = format!("{}{SUFFIX}", save.stem);
    let index = format!("{file}.index.json");
    let is_newest = || -> Result<bool> {
        let is_other =
            |name: &String| NameOfSave::of_lock(name).is_some_and(|lock| lock.stem == save.stem && lock != save);
        Ok(!names_in(directory)?.iter().any(is_other)
            && names_in_index(&directory.join(&index), check).is_some_and(|named| named.is_of(save)))
    };
    let is_older = |name: &String| *name == file || shard_stem(name) == Some(save.stem);
    let older = names_in(directory)?.into_iter().filter(|name| is_older(name) && !named.contains(name));
    // A checkpoint in a single file has an index only until the files that it has replaced are gone.
    let last = Some(index.clone()).filter(|_| named.iter().eq([&file]));
    for name in older.chain(last) {
        if !is_newest()? {
            break;
        }
        remove(directory.join(name), removed)?;
    }
    Ok(())
}

/// Names of files in a local index.
#[derive(Default)]
pub(super) struct Named {
    pub(super) files: BTreeSet<String>,
    /// Id of the save that wrote the index.
    save: Option<String>,
}

impl Named {
    fn is_of(&self, save: NameOfSave<'_>) -> bool {
        self.save.as_deref() == Some(save.token)
    }
}

/// Returns the name that a file gets once it is complete: NAME of `.NAME.PROCESS-NUMBER.fst-tmp`.
fn name_of_new_file(file: &str) -> Option<&str> {
    let (name, numbers) = file.strip_prefix('.')?.strip_suffix(TEMPORARY_SUFFIX)?.rsplit_once('.')?;
    let (process, number) = numbers.split_once('-')?;
    Some(name).filter(|_| is_number(process) && is_number(number))
}

/// Lists the names in a directory, without those that are not UTF-8.
pub(super) fn names_in(directory: &Path) -> Result<BTreeSet<String>> {
    Ok(directory::names_in(directory)?.into_iter().filter_map(|name| name.into_string().ok()).collect())
}

/// Returns the names in a local index, or `None` if it is there and cannot be read.
pub(super) fn names_in_index(index: &Path, check: Check<'_>) -> Option<Named> {
    let files = match Files::resolve(&[index], check) {
        Err(error) if error.kind() == Kind::FileNotFound => return Some(Named::default()),
        files => files.ok()?,
    };
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    let metadata = |key| files.listings.iter().find_map(|listing| listing.metadata.get(key).cloned());
    let (state, save) = (metadata(STATE), metadata(SAVE_KEY));
    Some(Named { files: files.places.iter().map(|place| text(place.file_name())).chain(state).collect(), save })
}

fn age_of(file: &Metadata) -> Duration {
    let changed = UNIX_EPOCH + Duration::from_secs(file.ctime().unsigned_abs());
    SystemTime::now().duration_since(changed).unwrap_or_default()
}

fn remove(path: PathBuf, removed: &mut Vec<Removed>) -> Result<()> {
    let bytes = fs::symlink_metadata(&path).map_or(0, |found| found.len());
    if remove_file(&path)? {
        removed.push(Removed { path: path.to_string_lossy().into_owned(), bytes });
    }
    Ok(())
}
