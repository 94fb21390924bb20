//! Files and directories in repositories of the Hugging Face Hub.

use super::Found;
use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use crate::remote::concurrency::Host;
use crate::remote::hub::{Access, File, describe, is_commit, is_offline};
use crate::remote::location::Location;
use crate::remote::retry::repeat;
use crate::remote::runtime;
use crate::remote::store_options;
use crate::remote::transport::Transport;
use crate::remote::trust::Trust;

/// Finds out what a URL of the Hub stands for, and pins its commit.
pub(super) fn find(location: &Location, check: Check<'_>) -> Result<Found> {
    let file = File::parse(location)?;
    let url = location.to_string();
    let local = |commit: &str| Some(file.snapshot(commit)?.join(&file.path)).filter(|path| path.exists());
    if is_offline() {
        let found = file.cached_commit().and_then(|commit| local(&commit));
        let message = "HF_HUB_OFFLINE is set, and the Hub's cache on this machine does not hold this revision";
        return found.map(Found::Local).ok_or_else(|| Error::new(Kind::FileNotFound, message).at(&url));
    }
    if let Some(path) = Some(&file.revision).filter(|commit| is_commit(commit)).and_then(|commit| local(commit))
        && path.is_file()
    {
        return Ok(Found::Local(path));
    }
    let mut settings = store_options::options_of(&url);
    let trust = Trust::take_from(&mut settings, &url)?;
    let access = Access::new(&settings, Transport::new(trust), &url)?;
    let revision = file.revision.replace('/', "%2F");
    let address = format!("{}/api/models/{}/revision/{revision}", access.endpoint, file.repository);
    let host = Host::of(&access.endpoint);
    let attempt = || describe(&address, &access);
    let described = runtime::block_on(check, repeat(&url, &host, None, 0, attempt))?;
    let names: Vec<String> = described.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
    let repository = file.repository.rsplit('/').next().unwrap_or_default();
    let pinned = |path: &str| match file.repository.split_once('/') {
        Some(_) => location.with_key(format!("{repository}@{}/{path}", described.sha)),
        None => location.with_key(format!("@{}/{path}", described.sha)),
    };
    let in_cache =
        |name: &str| file.snapshot(&described.sha).map(|snapshot| snapshot.join(name)).filter(|path| path.is_file());
    if names.contains(&file.path) {
        return Ok(in_cache(&file.path).map_or_else(|| Found::Object(pinned(&file.path)), Found::Local));
    }
    let prefix = if file.path.is_empty() { String::new() } else { format!("{}/", file.path) };
    let inside = |name: &String| name.strip_prefix(&prefix).filter(|rest| !rest.contains('/')).map(str::to_owned);
    let inside: Vec<String> = names.iter().filter_map(inside).collect();
    if inside.is_empty() {
        let message = format!("the repository has no file or folder {:?} at this revision", file.path);
        return Err(Error::new(Kind::FileNotFound, message).at(&url));
    }
    let is_weight = |name: &&String| name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    let weights: Vec<&String> = inside.iter().filter(is_weight).collect();
    let is_cached = !weights.is_empty() && weights.iter().all(|name| in_cache(&format!("{prefix}{name}")).is_some());
    match file.snapshot(&described.sha).filter(|_| is_cached) {
        Some(snapshot) => Ok(Found::Local(snapshot.join(&file.path))),
        None => Ok(Found::Prefix(pinned(&file.path), inside)),
    }
}
