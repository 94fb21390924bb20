//! Copies of objects in a directory of a local disk, which loads write as they pull bytes.
//!
//! For each version of an object the directory holds its whole content, or the ranges that loads have pulled so far:
//!
//! ```text
//! URL-VERSION.object    all bytes
//! URL-VERSION.part      a file of the object's length, of which only some ranges are written
//! URL-VERSION.ranges    begin and end of each written range, as u64
//! lock                  locked while files are created, completed or removed
//! ```
//!
//! `URL` and `VERSION` are digests. A range is listed once it is on the disk, so a process that is killed leaves nothing
//! that counts without being there. When the ranges cover the object, `.part` is renamed to `.object`. All processes write
//! the same bytes to the same place, since a version has one content.
//!
//! An open copy holds a shared lock on its file. The copies that were used last stay when room is needed, and a locked one
//! is not removed. Failures of the disk are logged, and the load goes on without its copy.

mod part;
mod queue;
pub mod ranges;

use crate::digest::Algorithm;
use crate::error::{Error, Result};
use crate::num::to_u64;
use crate::options::{self, CacheOptions};
use crate::os::file_lock::FileLock;
use crate::os::local_file::LocalFile;
use crate::remote::find::location::{Location, Service};
use crate::remote::find::version::Version;
pub(super) use part::Part;
pub(super) use queue::add;
pub use queue::flush;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatvfs};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

const OBJECT: &str = "object";
const PART: &str = "part";
const RANGES: &str = "ranges";
/// Length of a digest in a file name, in bytes.
const DIGEST_BYTES: usize = 16;
/// Longest time to wait for the lock of the directory, which is held for a few system calls.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_INTERVAL: Duration = Duration::from_millis(2);
/// Mode of files, which are as private as the objects.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Required and optional parameters of each kind of signed URLs, which differ for the same object. A server may use some
/// of their names for other purposes, but not all that a signature requires.
const SIGNATURES: [(&str, &str); 7] = [
    // Amazon S3 and services with its API, version 4 and version 2.
    (
        "X-Amz-Algorithm X-Amz-Credential X-Amz-Date X-Amz-Expires X-Amz-SignedHeaders X-Amz-Signature",
        "X-Amz-Security-Token",
    ),
    ("AWSAccessKeyId Expires Signature", "x-amz-security-token"),
    // Google Cloud Storage, version 4 and version 2.
    ("X-Goog-Algorithm X-Goog-Credential X-Goog-Date X-Goog-Expires X-Goog-SignedHeaders X-Goog-Signature", ""),
    ("GoogleAccessId Expires Signature", ""),
    // Amazon CloudFront, with a canned and with a custom policy.
    ("Expires Signature Key-Pair-Id", "Hash-Algorithm"),
    ("Policy Signature Key-Pair-Id", "Hash-Algorithm"),
    // Shared access signatures of Azure.
    ("sv sig", "ss srt sr sp st se sip spr si ses skoid sktid skt ske sks skv saoid suoid scid"),
];

/// Directory with copies of objects.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    directory: PathBuf,
    /// Upper bound for the lengths of all copies, in bytes. `None` for half of the space that the file system has.
    bytes_max: Option<u64>,
}

/// Copy of one version of an object.
#[derive(Clone, Debug)]
pub(super) enum Copy {
    Whole(Arc<LocalFile>),
    /// Some bytes, to which the load adds what it pulls.
    Part(Arc<Part>),
}

/// Names of the files of one version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    stem: PathBuf,
}

impl Entry {
    fn path(&self, ending: &str) -> PathBuf {
        self.stem.with_extension(ending)
    }

    fn remove(&self) -> io::Result<()> {
        [RANGES, PART, OBJECT].iter().try_for_each(|ending| match fs::remove_file(self.path(ending)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
    }
}

impl Cache {
    /// Opens the directory that `FST_CACHE_DIR` names, and creates it if it does not exist. Fails with
    /// `invalid-argument` for `FST_CACHE_BYTES`.
    pub(super) fn from_env() -> Result<Option<Cache>> {
        let Some(CacheOptions { directory, bytes_max }) = options::cache_from_env()? else { return Ok(None) };
        let created = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&directory);
        let doing = "cannot create the directory that FST_CACHE_DIR names";
        created.map_err(|error| Error::from_io(error, &directory, doing))?;
        Ok(Some(Cache { directory, bytes_max }))
    }

    /// Returns whether the directory holds all bytes of some version of an object.
    pub(super) fn has_whole(&self, name: &str) -> bool {
        let prefix = format!("{}-", digest([name]));
        let is_whole = |entry: fs::DirEntry| {
            let file = entry.file_name();
            Path::new(&file).extension().is_some_and(|ending| ending == OBJECT)
                && file.to_string_lossy().starts_with(&prefix)
        };
        fs::read_dir(&self.directory).is_ok_and(|entries| entries.flatten().any(is_whole))
    }

    /// Opens the copy of a version of an object, or begins one. Returns `None` if the version is not exact, if there is no
    /// room, or if the disk fails.
    pub(super) fn open(&self, location: &Location, name: &str, length: u64, version: &Version) -> Option<Copy> {
        if !version.is_exact() || length == 0 {
            return None;
        }
        let entry = self.entry(name, length, version);
        let copy = self.try_open(location, &entry, length).unwrap_or_else(|error| {
            tracing::warn!(url = %location, directory = %self.directory.display(), %error, "the cache cannot be used");
            None
        });
        match &copy {
            None => tracing::info!(url = %location, length, "the cache has no room for this object"),
            Some(Copy::Whole(_)) => tracing::info!(url = %location, "the cache holds this object"),
            Some(Copy::Part(part)) => {
                tracing::info!(url = %location, bytes = part.known_bytes(), length, "the cache holds some bytes");
            }
        }
        copy
    }

    fn entry(&self, name: &str, length: u64, version: &Version) -> Entry {
        let Version { etag, id, modified: _ } = version;
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        let version = digest([&*text(etag), &*text(id), &*length.to_string()]);
        Entry { stem: self.directory.join(format!("{}-{version}", digest([name]))) }
    }

    fn try_open(&self, location: &Location, entry: &Entry, length: u64) -> io::Result<Option<Copy>> {
        let _lock = self.lock()?;
        if let Some(part) = Part::open(self, entry, length)? {
            return Ok(Some(Copy::Part(Arc::new(part))));
        }
        let whole = open_existing(&entry.path(OBJECT))?;
        if let Some(file) = whole.filter(|file| file.metadata().is_ok_and(|metadata| metadata.len() == length)) {
            use_now(&file);
            let path = PathBuf::from(location.to_string());
            return Ok(Some(Copy::Whole(Arc::new(LocalFile::new(path, file, length)))));
        }
        entry.remove()?;
        if !self.make_room(length)? {
            return Ok(None);
        }
        Ok(Some(Copy::Part(Arc::new(Part::create(self, entry, length)?))))
    }

    /// Locks the directory against other processes and threads until the result is dropped.
    fn lock(&self) -> io::Result<FileLock> {
        let path = self.directory.join("lock");
        let file =
            Arc::new(open_file(OpenOptions::new().write(true).create(true).truncate(false).mode(FILE_MODE), &path)?);
        let begin = Instant::now();
        loop {
            match FileLock::try_exclusive(&file) {
                // A process that was stopped may hold the lock for ever.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && begin.elapsed() < LOCK_TIMEOUT => {
                    thread::sleep(LOCK_INTERVAL);
                }
                result => return result,
            }
        }
    }

    /// Removes the copies that were not used for the longest time until `bytes` more fit. Returns false if they do not
    /// fit, since the others are in use.
    fn make_room(&self, bytes: u64) -> io::Result<bool> {
        let mut copies = Vec::new();
        for found in fs::read_dir(&self.directory)? {
            let path = found?.path();
            let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
            if ending == RANGES && !path.with_extension(PART).exists() {
                fs::remove_file(&path)?;
            } else if ending == OBJECT || ending == PART {
                let metadata = fs::symlink_metadata(&path)?;
                if !metadata.is_file() {
                    continue;
                }
                copies.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), metadata.len(), path));
            }
        }
        copies.sort();
        let mut used: u64 = copies.iter().map(|(_, length, _)| length).sum();
        let bytes_max = match self.bytes_max {
            Some(bytes_max) => bytes_max,
            None => (free_bytes(&self.directory)?.saturating_add(used)) / 2,
        };
        if bytes > bytes_max {
            return Ok(false);
        }
        for (_, length, path) in copies {
            if used.saturating_add(bytes) <= bytes_max {
                break;
            }
            let file = open_file(OpenOptions::new().read(true), &path)?;
            if file.try_lock().is_ok() {
                Entry { stem: path.with_extension("") }.remove()?;
                tracing::info!(path = %path.display(), length, "removed a copy to make room");
                used = used.saturating_sub(length);
            }
        }
        Ok(used.saturating_add(bytes) <= bytes_max)
    }
}

/// Returns the name of an object, which is the same for all processes and for all signatures of a URL. `endpoints` tell
/// servers with the same URLs apart.
pub fn name_of(location: &Location, endpoints: &[String]) -> String {
    let query = match location.service() {
        Service::Http => location.query().map(unsigned).unwrap_or_default(),
        _ => String::new(),
    };
    format!("{}://{}\n{query}\n{}", location.scheme(), location.address(), endpoints.join("\n"))
}

/// Returns a query without the parameters of the signatures in it.
pub fn unsigned(query: &str) -> String {
    fn name(parameter: &str) -> &str {
        parameter.split_once('=').map_or(parameter, |(name, _)| name)
    }
    let has = |required: &str| query.split('&').any(|parameter| name(parameter) == required);
    let signed = SIGNATURES.iter().filter(|(required, _)| required.split_whitespace().all(has));
    let names: Vec<&str> = signed
        .flat_map(|(required, optional)| required.split_whitespace().chain(optional.split_whitespace()))
        .collect();
    let is_kept = |parameter: &&str| !names.contains(&name(parameter));
    query.split('&').filter(is_kept).collect::<Vec<_>>().join("&")
}

/// Returns a digest for a file name. The lengths of the parts are hashed, too, so that different parts differ.
fn digest<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let bytes: Vec<u8> =
        parts.into_iter().flat_map(|part| to_u64(part.len()).to_le_bytes().into_iter().chain(part.bytes())).collect();
    let mut hex = Algorithm::Sha256.digest(&bytes).hex();
    hex.truncate(2 * DIGEST_BYTES);
    hex
}

/// Opens a file for reading and locks it against removal, or returns `None` if it does not exist.
fn open_existing(path: &Path) -> io::Result<Option<File>> {
    match open_file(OpenOptions::new().read(true), path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(file) => {
            file.lock_shared()?;
            Ok(Some(file))
        }
    }
}

/// Opens a file of the cache. Neither a FIFO nor a device blocks the call.
fn open_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        let message = format!("{}: expected a regular file; remove it", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // Reads of the copy may wait, as reads of any other file.
    fcntl_setfl(&file, fcntl_getfl(&file)?.difference(OFlags::NONBLOCK))?;
    Ok(file)
}

fn use_now(file: &File) {
    if let Err(error) = file.set_modified(SystemTime::now()) {
        tracing::debug!(%error, "cannot mark a copy as used");
    }
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let stat = fstatvfs(File::open(directory)?)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn is_same(one: &File, path: &Path) -> io::Result<bool> {
    let own = one.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(other) => Ok((own.dev(), own.ino()) == (other.dev(), other.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
