//! Rotation of the keys of encrypted files: only the key slots in their headers change.

use crate::encryption::key::EncryptionKey;
use crate::error::{Error, Kind, Result};
use crate::format::encryption::Rotation;
use crate::format::header::Header;
use crate::num::to_u64;
use crate::os::local_file::LocalFile;
use crate::os::retry::Check;
use crate::os::sigint::{POLL_INTERVAL, Watch};
use crate::remote::location::Location;
use crate::save::file_kernel::FileKernel;
use crate::source::files::Files;
use crate::source::{Place, Source};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

/// Failure, for errors of the system.
const CANNOT_WRITE: &str = "cannot write a key slot";

/// Makes all local files that `paths` resolve to open with another key. Their data is not encrypted again.
///
/// The slot for the new key is on the disk before that of the old key is removed. After an error, some files may open with
/// the old key, with both, or with the new one; a second call with the old key completes the others. Of two calls for one
/// file at once, the second one waits for the first.
///
/// # Errors
/// Those of [`Files::resolve`], of [`EncryptionKey::for_save`], of opening the files and of [`Rotation::new`]; `io` if a
/// file cannot be written; `invalid-argument` for an object; `interrupted`.
pub fn rotate<P: AsRef<Path>>(
    paths: &[P],
    old: &EncryptionKey,
    new: &EncryptionKey,
    kernel: &dyn FileKernel,
) -> Result<()> {
    let watch = Watch::begin();
    let new = new.for_save()?;
    for place in Files::resolve(paths, &|| watch.check())?.places {
        watch.check()?;
        match place {
            Place::Path(path) => rotate_file(&path, old, &new, kernel, &|| watch.check())?,
            Place::Url(location) => return Err(unchangeable(&location)),
            Place::Opened(object) => return Err(unchangeable(object.location())),
        }
    }
    Ok(())
}

fn unchangeable(location: &Location) -> Error {
    let message = "the header of an object cannot be changed; save the object again with the new key";
    Error::new(Kind::InvalidArgument, message).at(location.to_string())
}

fn rotate_file(
    path: &Path,
    old: &EncryptionKey,
    new: &EncryptionKey,
    kernel: &dyn FileKernel,
    check: Check<'_>,
) -> Result<()> {
    let (local, file) = open_locked(path, check)?;
    let length = local.length;
    let json = Header::read_bytes(&Source::File(Arc::new(local)), check)?;
    let header = Header::parse(&json, length).map_err(|error| error.at(path))?;
    let rotation = Rotation::new(&header, &json, length, old, new).map_err(|error| error.at(path))?;
    let failed = |error| Error::from_io(error, path, CANNOT_WRITE);
    for (offset, text) in rotation.writes {
        write_all(kernel, &file, text.as_bytes(), offset).map_err(|error| failed(error).offset(offset))?;
        kernel.flush(&file).map_err(failed)?;
    }
    Ok(())
}

/// Opens a file for reading, and for writing with a lock that other rotations of the file wait for. Dropping the second
/// file releases the lock.
///
/// Without it, two rotations could write to the same empty slot, and each remove the slot of the old key.
fn open_locked(path: &Path, check: Check<'_>) -> Result<(LocalFile, File)> {
    let failed = |error| Error::from_io(error, path, CANNOT_WRITE);
    loop {
        let local = LocalFile::open(path)?;
        // The path may name another file by now.
        let own = format!("/proc/self/fd/{}", local.file.as_raw_fd());
        let file = OpenOptions::new().write(true).open(own).map_err(failed)?;
        lock(path, &file, check)?;
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        // A save may have replaced the file during the wait.
        if fs::metadata(path).map(identity).map_err(failed)? == file.metadata().map(identity).map_err(failed)? {
            return Ok((local, file));
        }
    }
}

fn lock(path: &Path, file: &File, check: Check<'_>) -> Result<()> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) => thread::sleep(POLL_INTERVAL),
            Err(error @ (Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK | Errno::INVAL)) => {
                tracing::warn!(path = %path.display(), %error, "cannot lock; rotate a file only once at a time");
                return Ok(());
            }
            Err(error) => return Err(Error::from_io(error.into(), path, "cannot lock the file")),
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
