//! Files that a manifest lists: their digests, and whether a checkpoint has all of them.

use super::Input;
use crate::digest::InputDigest;
use crate::digest::manifest::{MANIFEST_BYTES_MAX, Manifest};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::source::directory::FILE_SUFFIX;
use crate::source::files::{Files, Listing, absolute, parent_of, place_of};
use crate::source::{Place, Source};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// Returns the digest of a file in a manifest. Fails with `integrity` if the manifest has none, or one of a file of
/// another length.
pub(crate) fn digest_of(source: &Source, manifest: &Manifest) -> Result<InputDigest> {
    let missing = || Error::new(Kind::Integrity, manifest.missing()).at(source.path());
    // The name in a manifest may contain directories that a relative path lacks.
    let digest = manifest.find(&absolute(source.path())).ok_or_else(missing)?.clone();
    check_length(&digest, source.path(), source.length(), manifest.origin())?;
    Ok(digest)
}

/// Resolves paths to files that are to be compared with a manifest, and compares index files that it lists.
///
/// A directory, or an index without a digest, must not leave out files: it stands for all safetensors files that the
/// manifest lists in the directories of the index and of its files.
pub(crate) fn resolve_listed<P: AsRef<Path>>(paths: &[P], manifest: &Manifest, check: Check<'_>) -> Result<Files> {
    let compare = |index: &Path, bytes: &[u8]| compare_index(manifest, index, bytes);
    let files = Files::resolve_with(paths, Some(&compare), check)?;
    let names: Vec<(String, Option<&str>)> = files.places.iter().map(|place| named(place, manifest)).collect();
    let loaded: HashSet<&str> = names.iter().filter_map(|(_, name)| *name).collect();
    for Listing { path, directory, files, .. } in files.listings.iter().filter(|listing| !listing.is_compared) {
        if files.is_empty() {
            return Err(Error::new(Kind::Integrity, "the index names no file, and has no digest").at(path));
        }
        let own = names.get(files.clone()).unwrap_or_default();
        let directories: HashSet<&str> =
            own.iter().flat_map(|(path, name)| listed_in(path, *name, directory)).collect();
        let mut listed = manifest.entries().map(|(name, _)| name).filter(|name| name.ends_with(FILE_SUFFIX));
        if let Some(name) = listed.find(|name| directories.contains(parent_of(name)) && !loaded.contains(name)) {
            let message = format!(
                "{name:?} is not among its files, but {} lists it; restore the file or the index, or give the paths of the \
                 files to load",
                manifest.origin()
            );
            return Err(Error::new(Kind::Integrity, message).at(path));
        }
    }
    Ok(files)
}

/// Returns the absolute path of a file and its name in a manifest.
fn named<'a>(place: &Place, manifest: &'a Manifest) -> (String, Option<&'a str>) {
    let path = place.absolute();
    let name = manifest.find_entry(&path).map(|(name, _)| name);
    (path, name)
}

/// Returns the directory in a manifest that has the file at a path, and the one that corresponds to `directory`, in which
/// the file is.
fn listed_in<'a>(path: &str, name: Option<&'a str>, directory: &str) -> impl Iterator<Item = &'a str> {
    let inside = path.strip_prefix(directory).and_then(|rest| rest.strip_prefix('/'));
    let directory = name.zip(inside).and_then(|(name, inside)| name.strip_suffix(inside));
    let directory =
        directory.filter(|rest| rest.is_empty() || rest.ends_with('/')).map(|rest| rest.trim_end_matches('/'));
    name.map(parent_of).into_iter().chain(directory)
}

/// Compares the content of an index with its digest in a manifest. Returns whether the manifest has one.
fn compare_index(manifest: &Manifest, index: &Path, bytes: &[u8]) -> Result<bool> {
    let Some((_, digest)) = manifest.find_entry(&absolute(index)).filter(|(name, _)| !name.is_empty()) else {
        return Ok(false);
    };
    let (digest, origin, end) = (digest.clone(), manifest.origin(), to_u64(bytes.len()));
    check_length(&digest, index, end, origin)?;
    let path = index.to_path_buf();
    let input = Input { digest, origin, source: 0, path, tensor: None, begin: 0, end, header: Arc::default() };
    for (shard, stated) in input.shards() {
        let content = bytes.get(to_usize(shard.start)..to_usize(shard.end)).unwrap_or_default();
        input.compare((&shard, stated), stated.algorithm.digest(content))?;
    }
    Ok(true)
}

/// Checks the length of a file, if its digests state one.
pub(crate) fn check_length(digest: &InputDigest, path: &Path, found: u64, origin: &str) -> Result<()> {
    match digest.length() {
        Some(length) if length != found => {
            let message = format!("the file has {found} bytes, but {origin} states {length}");
            Err(Error::new(Kind::Integrity, message).at(path))
        }
        _ => Ok(()),
    }
}

/// Reads a manifest from a file or object. Fails with the errors of [`Manifest::parse`] and of opening the manifest.
pub fn read_manifest(path: &Path) -> Result<Manifest> {
    read_whole(path, "a manifest", Manifest::parse)
}

/// Reads and parses a small file or object. Errors have its path.
pub(super) fn read_whole<T>(path: &Path, what: &str, parse: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    let watch = Watch::begin();
    let check = || watch.check();
    let source = Source::open(&place_of(path)?, &check)?;
    if source.length() > MANIFEST_BYTES_MAX {
        let message = format!("{what} has at most {MANIFEST_BYTES_MAX} bytes, not {}", source.length());
        return Err(Error::new(Kind::Malformed, message).at(source.path()));
    }
    let mut bytes = vec![0; to_usize(source.length())];
    source.read(0, &mut bytes, &check)?;
    parse(&bytes).map_err(|error| error.at(source.path()))
}
