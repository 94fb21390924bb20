//! Objects and prefixes with a checkpoint, from their URLs.

pub(super) mod below;
mod hub;
pub(super) mod listing;
pub mod location;
pub mod name;
pub(super) mod repository;
pub mod version;

use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use crate::remote::find::location::Location;
use crate::remote::find::name::Name;
use crate::remote::stores::registry;
use crate::remote::transfer::cache;
use crate::remote::transfer::concurrency::Host;
use crate::remote::transfer::limits::FIRST_BYTES;
use crate::remote::transfer::object::{Object, open};
use crate::remote::transfer::retry::repeat;
use crate::remote::transfer::runtime;
use std::path::PathBuf;

/// Object, prefix or local path for which a URL stands.
pub enum Found {
    /// An object.
    Object(Location),
    /// An object that was opened to find out whether it exists.
    Opened(Object),
    /// A prefix, with the names of the objects in it.
    Prefix(Location, Vec<Name>),
    /// A local file or directory: the Hub's own cache holds what the URL names.
    Local(PathBuf),
}

/// Finds out what a URL stands for. Sends no request for the URL of an object that ends with one of `endings`.
pub fn find(location: &Location, endings: &[&str], check: Check<'_>) -> Result<Found> {
    match location.repository().filter(|repository| !repository.is_bucket()) {
        Some(repository) => hub::find(location, repository, endings, check),
        None => find_listed(location, endings, check),
    }
}

/// Finds out what a URL stands for, if the names below it can be listed at most.
fn find_listed(location: &Location, endings: &[&str], check: Check<'_>) -> Result<Found> {
    if endings.iter().any(|ending| location.key().ends_with(ending)) || location.has_query() {
        return Ok(Found::Object(location.clone()));
    }
    let (store, _) = registry::store_of(location)?;
    let url = location.to_string();
    let host = Host::of(location.host());
    let listed = runtime::block_on(check, repeat(&url, &host, None, 0, || store.list(location.key())))?;
    let is_prefix = location.key().is_empty() || location.key().ends_with('/');
    match listed {
        Some(names) if !names.is_empty() => Ok(Found::Prefix(location.clone(), names)),
        None if is_prefix => find_by_convention(location, endings, check),
        _ if is_prefix => Err(Error::new(Kind::FileNotFound, "no object begins with this prefix").at(&url)),
        _ => Ok(Found::Object(location.clone())),
    }
}

/// Finds the checkpoint below a prefix of a server that cannot list: the index with the usual name, or the file.
fn find_by_convention(location: &Location, endings: &[&str], check: Check<'_>) -> Result<Found> {
    for ending in endings {
        let Ok(name) = Name::parse(&format!("model{ending}")) else { continue };
        match open(&location.child(&name)?, FIRST_BYTES, check) {
            Ok(object) => return Ok(Found::Opened(object)),
            Err(error) if error.kind() == Kind::FileNotFound => {}
            Err(error) => return Err(error),
        }
    }
    let names: Vec<String> = endings.iter().map(|ending| format!("model{ending}")).collect();
    let message = format!("this server cannot list files, and holds none of {} here", names.join(", "));
    Err(Error::new(Kind::FileNotFound, message).at(location.to_string()))
}

/// Returns whether two URLs stand for the same: they differ at most in what authorizes requests.
pub fn is_same(one: &Location, other: &Location) -> bool {
    cache::name_of(one, &[]) == cache::name_of(other, &[])
}

/// Returns all bytes of a small object. Fails with `malformed` if it has more than `bytes_max` bytes.
pub fn read_all(object: &Object, bytes_max: u64, check: Check<'_>) -> Result<Vec<u8>> {
    let length = object.length();
    let size = usize::try_from(length).ok().filter(|_| length <= bytes_max).ok_or_else(|| {
        let message = format!("the file has {length} bytes; at most {bytes_max} are accepted");
        Error::new(Kind::Malformed, message).at(object.path())
    })?;
    let mut bytes = vec![0; size];
    object.read(std::iter::once((0, bytes.as_mut_slice())), check)?;
    Ok(bytes)
}
