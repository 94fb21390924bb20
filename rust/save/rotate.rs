//! Rotation of the keys of encrypted files: only the key slots in their headers change.

use crate::encryption::key::EncryptionKey;
use crate::error::{Error, Kind, Result};
use crate::format::encryption::Rotation;
use crate::format::header::Header;
use crate::num::to_u64;
use crate::os::file_lock::FileLock;
use crate::os::local_file::LocalFile;
use crate::os::retry::{Check, repeat};
use crate::os::sigint::{POLL_INTERVAL, Watch};
use crate::remote::find::location::Location;
use crate::save::direct_file::flush;
use crate::save::file_kernel::FileKernel;
use crate::source::files::Files;
use crate::source::{Place, Source};
use rustix::io::Errno;
use std::cell::Cell;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Failure, for errors of the system.
const CANNOT_WRITE: &str = "cannot write a key slot";

/// Makes all local files that `paths` resolve to open with another key. Their data is not encrypted again.
///
/// The slot for the new key is on the disk before the old key's slot is removed. After an error, some files may open
/// with the old key, with both, or with the new one; a second call with the same keys completes the others. Of two calls
/// for one file at once, the second one waits for the first. Returns false if a file stays locked for the time `limit`, so
/// that the caller can handle its signals before it calls again.
///
/// # Errors
/// `integrity` if no file opens with the old key, `io` if a file cannot be written, `invalid-argument` for an object.
pub fn rotate<P: AsRef<Path>>(
    paths: &[P],
    old: &EncryptionKey,
    new: &EncryptionKey,
    kernel: &dyn FileKernel,
    limit: Option<Duration>,
) -> Result<bool> {
    let watch = Watch::begin();
    let keys = [old, new, &new.for_save()?];
    // The error of the first file that an earlier call has completed, until one opens with the old key.
    let (mut refusal, mut is_any_rotated) = (None, false);
    for place in Files::resolve(paths, &|| watch.check())?.places {
        watch.check()?;
        let path = match place {
            Place::Path(path) => path,
            Place::Url(location) => return Err(unchangeable(&location)),
            Place::Opened(object) => return Err(unchangeable(object.location())),
        };
        let (begin, is_over) = (Instant::now(), Cell::new(false));
        let check = || {
            is_over.set(limit.is_some_and(|limit| begin.elapsed() > limit));
            let message = "waited for another process that has locked the file";
            if is_over.get() { Err(Error::new(Kind::Interrupted, message).at(&path)) } else { watch.check() }
        };
        let opened = open_locked(&path, &check);
        if is_over.get() {
            return Ok(false);
        }
        match rotate_file(&path, opened?, keys, kernel, &|| watch.check())? {
            Some(error) => refusal = refusal.or(Some(error)),
            None => is_any_rotated = true,
        }
    }
    refusal.filter(|_| !is_any_rotated).map_or(Ok(true), Err)
}

fn unchangeable(location: &Location) -> Error {
    let message = "the header of an object cannot be changed; save the object again with the new key";
    Error::new(Kind::InvalidArgument, message).at(location.to_string())
}

/// Rotates one file. Returns the error of the old key if the file opens with the new one only.
fn rotate_file(
    path: &Path,
    (local, file, _lock): (LocalFile, Arc<File>, Option<FileLock>),
    [old, new, new_for_save]: [&EncryptionKey; 3],
    kernel: &dyn FileKernel,
    check: Check<'_>,
) -> Result<Option<Error>> {
    let length = local.length;
    let json = Header::read_bytes(&Source::File(Arc::new(local)), check)?;
    let header = Header::parse(&json, length).map_err(|error| error.at(path))?;
    let rotation = match Rotation::new(&header, &json, length, old, new_for_save) {
        Ok(rotation) => rotation,
        Err(error) if Rotation::new(&header, &json, length, new, new_for_save).is_ok() => {
            return Ok(Some(error.at(path)));
        }
        Err(error) => return Err(error.at(path)),
    };
    let failed = |error| Error::from_io(error, path, CANNOT_WRITE);
    for (offset, text) in rotation.writes {
        write_all(kernel, &file, text.as_bytes(), offset).map_err(|error| failed(error).offset(offset))?;
        flush(&file, kernel, check)?.map_err(failed)?;
    }
    Ok(None)
}

/// Opens a file for reading, and for writing with a lock that other rotations of the file wait for.
///
/// Without it, two rotations could write to the same empty slot, and each remove the slot of the old key.
fn open_locked(path: &Path, check: Check<'_>) -> Result<(LocalFile, Arc<File>, Option<FileLock>)> {
    let failed = |error: io::Error| Error::from_io(error, path, CANNOT_WRITE);
    loop {
        let local = LocalFile::open(path)?;
        // The path may name another file by now. A process that reads the file may hold a lease.
        let own = format!("/proc/self/fd/{}", local.file.as_raw_fd());
        let open = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&own);
        let file = Arc::new(repeat(check, open)?.map_err(failed)?);
        let lock = lock(path, &file, check)?;
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        // A save may have replaced the file during the wait.
        if fs::metadata(path).map(identity).map_err(failed)? == file.metadata().map(identity).map_err(failed)? {
            return Ok((local, file, lock));
        }
    }
}

/// Waits for the lock of a file. Returns `None` on a file system without locks.
fn lock(path: &Path, file: &Arc<File>, check: Check<'_>) -> Result<Option<FileLock>> {
    let mut is_waiting = false;
    loop {
        match FileLock::try_exclusive(file) {
            Ok(lock) => return Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !std::mem::replace(&mut is_waiting, true) {
                    tracing::info!(path = %path.display(), "waiting for another process that has locked the file");
                }
                thread::sleep(POLL_INTERVAL);
            }
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK | Errno::INVAL) => {
                    tracing::warn!(path = %path.display(), %error, "cannot lock; rotate a file only once at a time");
                    return Ok(None);
                }
                _ => return Err(Error::from_io(error, path, "cannot lock the file")),
            },
        }
        check()?;
    }
}

fn write_all(kernel: &dyn FileKernel, file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match kernel.write_at(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = bytes.get(count..).unwrap_or_default();
                offset = offset.saturating_add(to_u64(count));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
