//! Files and directories in repositories of the Hugging Face Hub.

use super::Found;
use super::listing;
use super::location::Location;
use super::name::Name;
use super::repository::Repository;
use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use crate::remote::stores::hub::{Access, Description, cached_commit, describe, is_commit, is_offline, snapshot};
use crate::remote::stores::store_options;
use crate::remote::stores::transport::Transport;
use crate::remote::stores::trust::Trust;
use crate::remote::transfer::concurrency::Host;
use crate::remote::transfer::retry::repeat;
use crate::remote::transfer::runtime;
use std::path::PathBuf;

/// Finds out what a URL of the Hub stands for, and pins its commit.
///
/// `hf://a/b` is the repository `b` of `a`, or else the file or folder `b` of the repository `a`, which has no owner.
pub(super) fn find(location: &Location, repository: &Repository, endings: &[&str], check: Check<'_>) -> Result<Found> {
    let find = |repository: &Repository, path: &str| find_in(location, repository, path, endings, check);
    let path = location.key();
    let found = find(repository, path);
    let is_refused = |error: &Error| matches!(error.kind(), Kind::FileNotFound | Kind::PermissionDenied);
    match (found, repository.without_owner(path)) {
        (Err(error), Some((repository, path))) if is_refused(&error) => {
            find(&repository, &path).map_err(|other| if is_refused(&other) { error } else { other })
        }
        (found, _) => found,
    }
}

fn find_in(
    location: &Location,
    repository: &Repository,
    path: &str,
    endings: &[&str],
    check: Check<'_>,
) -> Result<Found> {
    let url = location.to_string();
    let in_cache = |commit: &str| Some(snapshot(repository, commit)?.join(path));
    if is_offline() {
        let found = cached_commit(repository).and_then(|commit| in_cache(&commit)).filter(|path| path.exists());
        let message = "HF_HUB_OFFLINE is set, and the Hub's cache on this machine does not hold this revision";
        return found.map(Found::Local).ok_or_else(|| Error::new(Kind::FileNotFound, message).at(&url));
    }
    let commit = Some(repository.revision()).filter(|revision| is_commit(revision));
    if let Some(path) = commit.and_then(in_cache).filter(|path| path.is_file()) {
        return Ok(Found::Local(path));
    }
    let mut settings = store_options::options_of(location);
    let trust = Trust::take_from(&mut settings, &url)?;
    let access = Access::new(&settings, Transport::new(trust), &url)?;
    let host = Host::of(&access.endpoint);
    let attempt = || describe(repository, &access);
    let Description { sha, siblings } = runtime::block_on(check, repeat(&url, &host, None, 0, attempt))?;
    let pinned = location.with_repository(repository.at(&sha), path);
    let local = in_cache(&sha);
    if siblings.iter().any(|sibling| sibling.rfilename == path) {
        return Ok(local.filter(|path| path.is_file()).map_or(Found::Object(pinned), Found::Local));
    }
    if repository.has_lists() {
        return super::find_listed(&pinned, endings, check);
    }
    let prefix = listing::prefix_of(path);
    let names: Vec<Name> =
        siblings.iter().filter_map(|sibling| listing::name_of(&sibling.rfilename, &prefix)).collect();
    if names.is_empty() {
        let message = format!("the repository has no file or folder {path:?} at this revision");
        return Err(Error::new(Kind::FileNotFound, message).at(&url));
    }
    let is_weight = |name: &&Name| endings.iter().any(|ending| name.as_str().ends_with(ending));
    let mut weights = names.iter().filter(is_weight).peekable();
    let is_cached = |local: &PathBuf| weights.peek().is_some() && weights.all(|name| local.join(name).is_file());
    Ok(local.filter(is_cached).map_or(Found::Prefix(pinned, names), Found::Local))
}
