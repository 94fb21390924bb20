//! States the digests of the files of a model, and compares them with a signature: a directory with files of any kind, or
//! one file.
//!
//! The rules are the reference's: the statement names every file below the directory, except ignored ones. The
//! files of Git are always ignored, symbolic links are refused unless they are allowed, and links to directories are
//! not followed.

use crate::checkpoint::verify::SignatureRequest;
use crate::digest::manifest::normalized;
use crate::digest::{Algorithm, Digest, Hash};
use crate::error::{Error, Kind, Result};
use crate::load::check::{self, FILES_OPEN_MAX};
use crate::num::to_usize;
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::reader;
use crate::signature::Signed;
use crate::signature::statement::{Shards, Statement};
use crate::source::Source;
use crate::source::files::{local_path, place_of, url_of};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Files of Git, which are ignored.
const GIT_PATHS: [&str; 4] = [".git", ".gitattributes", ".github", ".gitignore"];
/// Maximum number of file names in an error.
const NAMES_SHOWN: usize = 10;
/// Number of bytes that a thread reads at once.
const BLOCK_BYTES: u64 = 512 << 10;

/// Files of a model that count.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Rules {
    /// Further paths to ignore, relative to the directory. A directory stands for all files in it.
    pub ignored: Vec<String>,
    /// Whether files that the signature does not name are allowed.
    pub ignore_unsigned: bool,
    /// Whether files may be symbolic links.
    pub allow_symlinks: bool,
}

/// Request to state the digests of a model, for a new signature.
#[derive(Debug, Deserialize)]
pub struct StatementRequest {
    /// Path of the new signature, which is not signed.
    pub path: PathBuf,
    algorithm: String,
    shard_bytes: Option<u64>,
    #[serde(flatten)]
    rules: Rules,
}

/// Verifies a signature, compares all files of the model with it, and returns their number. Fails with `integrity` for
/// a signature that is not valid, a difference, or a file that the signature does not name; `file-not-found` for a
/// missing file.
pub fn verify(request: &SignatureRequest, rules: &Rules, model: &Path, options: &Options) -> Result<usize> {
    let Signed { manifest, ignored } = request.verify()?;
    if url_of(model)?.is_none() {
        let model = local_path(model)?;
        let names: BTreeSet<&str> = manifest.entries().map(|(name, _)| name).collect();
        if !rules.ignore_unsigned {
            let ignored = ignored_paths(&model, &request.path, ignored.iter().chain(&rules.ignored));
            // Without shards, an empty file is not in the signature.
            let is_sharded = manifest.entries().any(|(_, digest)| digest.length().is_some());
            let mut unsigned = files(&model, &ignored, rules.allow_symlinks)?;
            unsigned.retain(|(name, bytes)| !(names.contains(name.as_str()) || is_sharded && *bytes == 0));
            if let Some(message) = unsigned_message(&unsigned) {
                return Err(Error::new(Kind::Integrity, message).at(&model));
            }
        }
        for name in names {
            check_link(&joined(&model, name), rules.allow_symlinks)?;
            check_directories(&model, name)?;
        }
    }
    check::check_manifest(&manifest, model, options)?;
    Ok(manifest.entries().len())
}

/// Hashes all files of a model, and returns the statement about them. Fails with `invalid-argument` for an unknown
/// algorithm, or a file that cannot be signed.
pub fn statement(request: &StatementRequest, model: &Path, options: &Options) -> Result<String> {
    let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
    let algorithm = Algorithm::from_name(&request.algorithm).ok_or_else(|| {
        invalid(format!("the algorithm is {:?}, but must be sha256, blake2b or blake3", request.algorithm))
    })?;
    match request.shard_bytes {
        Some(0) => return Err(invalid("a shard has at least one byte".into())),
        Some(_) if algorithm == Algorithm::Blake3 => {
            return Err(invalid("signatures have no shards with blake3, which hashes parts in parallel itself".into()));
        }
        _ => {}
    }
    let model = local_path(model)?;
    let ignored = ignored_paths(&model, &request.path, &request.rules.ignored);
    let names = files(&model, &ignored, request.rules.allow_symlinks)?;
    if names.is_empty() {
        return Err(invalid("the directory has no file to sign".into()).at(&model));
    }
    let mut files = Vec::with_capacity(names.len());
    for names in names.chunks(FILES_OPEN_MAX) {
        files.extend(hash(&model, names, algorithm, request.shard_bytes, options)?);
    }
    let absolute = fs::canonicalize(&model).map_err(|error| Error::from_io(error, &model, "cannot open"))?;
    let name = absolute.file_name().unwrap_or_default().to_string_lossy();
    let ignored = ignored.into_iter().collect();
    Statement::new(&name, files, algorithm, request.shard_bytes, ignored, request.rules.allow_symlinks).to_json()
}

/// Hashes files, or their shards. All of them are open at once.
fn hash(
    model: &Path,
    names: &[(String, u64)],
    algorithm: Algorithm,
    shard_bytes: Option<u64>,
    options: &Options,
) -> Result<Vec<(String, Shards)>> {
    let watch = Watch::begin();
    let check = || watch.check();
    let mut shards: Vec<(usize, Range<u64>, OnceLock<Digest>)> = Vec::new();
    let mut readers = Vec::new();
    for (file, (name, _)) in names.iter().enumerate() {
        let source = Source::open(&place_of(&joined(model, name))?, &check)?;
        let (length, step) = (source.length(), shard_bytes.unwrap_or(u64::MAX));
        let mut begin = 0;
        // An empty file has a digest, but no shards.
        while begin < length || (length == 0 && begin == 0 && shard_bytes.is_none()) {
            let end = begin.saturating_add(step).min(length);
            shards.push((file, begin..end, OnceLock::new()));
            begin = end.max(begin.saturating_add(1));
        }
        readers.push(reader::open_buffered(options, &source));
    }
    threads::for_each(options.threads, shards.len(), |index| {
        let Some((file, range, digest)) = shards.get(index) else { return Ok(()) };
        let Some(reader) = readers.get(*file) else { return Ok(()) };
        let hash = Hash::new(algorithm, range.end - range.start);
        let mut buffer = vec![0; to_usize(BLOCK_BYTES.min(hash.length()))];
        let mut at = range.start;
        while at < range.end {
            check()?;
            let count = BLOCK_BYTES.min(range.end - at);
            let block = buffer.get_mut(..to_usize(count)).unwrap_or_default();
            reader.read(at, block, &check)?;
            if let Some(found) = hash.add(at - range.start, block, &check)? {
                digest.get_or_init(|| found);
            }
            at += count;
        }
        digest.get_or_init(|| algorithm.digest(&[]));
        Ok(())
    })?;
    let mut files: Vec<(String, Shards)> =
        names.iter().map(|(name, _)| (if name.is_empty() { ".".into() } else { name.clone() }, Vec::new())).collect();
    for (file, range, digest) in shards {
        if let (Some((_, shards)), Some(digest)) = (files.get_mut(file), digest.into_inner()) {
            shards.push((range, digest));
        }
    }
    Ok(files)
}

/// Returns the normalized paths to ignore: files of Git, the signature if it is below the directory, and others.
fn ignored_paths<'a>(model: &Path, signature: &Path, others: impl IntoIterator<Item = &'a String>) -> BTreeSet<String> {
    let mut ignored: BTreeSet<String> = GIT_PATHS.into_iter().map(str::to_owned).collect();
    let directory = signature.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let (Ok(model), Ok(directory), Some(name)) =
        (fs::canonicalize(model), fs::canonicalize(directory), signature.file_name())
        && let Ok(relative) = directory.join(name).strip_prefix(model)
    {
        ignored.extend(relative.to_str().and_then(normalized));
    }
    ignored.extend(others.into_iter().filter_map(|path| normalized(path)));
    ignored
}

/// Returns the paths and sizes of all files below a directory that are not ignored, or one empty path for a file.
fn files(model: &Path, ignored: &BTreeSet<String>, allow_symlinks: bool) -> Result<Vec<(String, u64)>> {
    let failed = |error: io::Error, path: &Path| Error::from_io(error, path, "cannot look at the files");
    let metadata = fs::metadata(model).map_err(|error| failed(error, model))?;
    if !metadata.is_dir() {
        return Ok(vec![(String::new(), metadata.len())]);
    }
    let mut found = Vec::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        let path = joined(model, &directory);
        for entry in fs::read_dir(&path).map_err(|error| failed(error, &path))? {
            let entry = entry.map_err(|error| failed(error, &path))?;
            let name = entry.file_name().into_string().map_err(|name| {
                let message = format!("the name {name:?} is not UTF-8, which a signature cannot state");
                Error::new(Kind::InvalidArgument, message).at(&path)
            })?;
            let name = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            if ignored.contains(&name) {
                continue;
            }
            let path = entry.path();
            check_link(&path, allow_symlinks)?;
            let is_link = entry.file_type().map_err(|error| failed(error, &path))?.is_symlink();
            let metadata = fs::metadata(&path).map_err(|error| failed(error, &path))?;
            match (metadata.is_dir(), is_link) {
                (true, false) => directories.push(name),
                (true, true) => {}
                (false, _) if metadata.is_file() => found.push((name, metadata.len())),
                (false, _) => {
                    let message = "a signature cannot cover this file, which is neither a file nor a directory";
                    return Err(Error::new(Kind::InvalidArgument, message).at(&path));
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

fn joined(model: &Path, name: &str) -> PathBuf {
    if name.is_empty() { model.to_path_buf() } else { model.join(name) }
}

fn check_link(path: &Path, allow_symlinks: bool) -> Result<()> {
    if !allow_symlinks && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        let message =
            "the file is a symbolic link, which may lead to other bytes later; allow symbolic links to accept it";
        return Err(Error::new(Kind::InvalidArgument, message).at(path));
    }
    Ok(())
}

/// Checks that no directory between the model's and a file in it is a link, as when the model was signed.
fn check_directories(model: &Path, name: &str) -> Result<()> {
    for directory in Path::new(name).ancestors().skip(1).filter(|directory| !directory.as_os_str().is_empty()) {
        let path = model.join(directory);
        if fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink()) {
            let message =
                format!("the directory is a symbolic link, which is not followed to the signed file {name:?}");
            return Err(Error::new(Kind::InvalidArgument, message).at(&path));
        }
    }
    Ok(())
}

fn unsigned_message<'a>(unsigned: &'a [(String, u64)]) -> Option<String> {
    let shown = |(name, _): &'a (String, u64)| if name.is_empty() { "." } else { name.as_str() };
    let names: Vec<&str> = unsigned.iter().take(NAMES_SHOWN).map(shown).collect();
    let more = unsigned.len().saturating_sub(names.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!names.is_empty()).then(|| format!("the signature does not name these files: {}{more}", names.join(", ")))
}
