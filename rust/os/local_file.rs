//! Open local files.

use crate::error::{Error, Kind, Result};
use crate::os::retry::{Check, read_full, repeat};
use rustix::fs::{Advice, Mode, OFlags, fadvise, fcntl_setfl, open};
use rustix::io::retry_on_intr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

/// Open local file of a checkpoint.
#[derive(Debug)]
pub struct LocalFile {
    /// Path, as the caller gave it.
    pub path: PathBuf,
    /// Kept open for the whole load: if the path is replaced, the load reads the file whose header was checked.
    pub file: File,
    /// Length in bytes when the file was opened.
    pub length: u64,
    /// Offset after the last small region that was read.
    pub small_end: AtomicU64,
}

impl LocalFile {
    /// Opens a file for reading.
    pub fn open(path: &Path) -> Result<LocalFile> {
        let (file, metadata) = open_regular(path)?;
        Ok(LocalFile::new(path.to_path_buf(), file, metadata.len()))
    }

    /// Takes an open regular file. `path` is for errors.
    pub fn new(path: PathBuf, file: File, length: u64) -> LocalFile {
        // Reads are planned, so the readahead of the kernel would only read unused bytes.
        if let Err(error) = fadvise(&file, 0, None, Advice::Random) {
            tracing::debug!(path = %path.display(), %error, "fadvise failed");
        }
        LocalFile { path, file, length, small_end: AtomicU64::new(0) }
    }

    /// Fills `into` with the bytes from `offset`. Fails with `io` if reading fails, `malformed` if the file has become
    /// shorter.
    pub fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        let failed = |error, at| Error::from_io(error, &self.path, "cannot read").offset(at);
        let read_at = |buffer: &mut [u8], at| self.file.read_at(buffer, at);
        if read_full(read_at, offset, into, check, failed)? < into.len() {
            let message = "the file became shorter while it was read";
            return Err(Error::new(Kind::Malformed, message).at(&self.path).offset(offset));
        }
        Ok(())
    }

    /// Opens the file again with O_DIRECT. Does not use its path, which may name another file by now.
    pub fn reopen_direct(&self) -> io::Result<File> {
        self.reopen_with(OFlags::DIRECT)
    }

    /// Opens the file again. Does not use its path.
    pub fn reopen(&self) -> io::Result<File> {
        self.reopen_with(OFlags::empty())
    }

    fn reopen_with(&self, flags: OFlags) -> io::Result<File> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | flags;
        Ok(File::from(retry_on_intr(|| open(&*own, flags, Mode::empty()))?))
    }
}

/// Opens a regular file for reading, and returns its metadata. Neither a FIFO nor a device blocks the call. Fails with
/// `is-a-directory`, or `invalid-argument` for anything else that is not a regular file.
pub fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    let open = |flags| Ok(retry_on_intr(|| open(path, OFlags::RDONLY | flags, Mode::empty())).map_err(io::Error::from));
    open_checked(path, "cannot open", open)
}

/// Opens a regular file for reading and writing. Waits while a process holds a lease on it, as loads do for a moment.
pub fn open_regular_for_writes(path: &Path, check: Check<'_>) -> Result<File> {
    let open = |flags| repeat(check, || Ok(open(path, OFlags::RDWR | flags, Mode::empty())?));
    open_checked(path, "cannot open the file for writing", open).map(|(file, _)| file)
}

fn open_checked(
    path: &Path,
    doing: &str,
    open: impl FnOnce(OFlags) -> Result<io::Result<OwnedFd>>,
) -> Result<(File, Metadata)> {
    let failed = |error: io::Error| Error::from_io(error, path, doing);
    // Opening a device may have effects. This check avoids them, and the second one cannot be outrun by a rename.
    check_regular(path, &fs::metadata(path).map_err(failed)?)?;
    let file = File::from(open(OFlags::NONBLOCK | OFlags::CLOEXEC)?.map_err(failed)?);
    let metadata = file.metadata().map_err(failed)?;
    check_regular(path, &metadata)?;
    // The kernel passes the flag on to FUSE file systems, which may then refuse to wait for data.
    fcntl_setfl(&file, OFlags::empty()).map_err(|error| failed(error.into()))?;
    Ok((file, metadata))
}

/// Checks that the metadata of a path belong to a regular file. Fails with `is-a-directory`; `invalid-argument` for
/// a FIFO, a socket or a device.
pub fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    let kind = metadata.file_type();
    let found = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => {
            return Err(Error::new(Kind::IsADirectory, "is a directory; expected a regular file").at(path));
        }
        _ if kind.is_fifo() => "FIFO",
        _ if kind.is_socket() => "socket",
        _ if kind.is_char_device() => "character device",
        _ if kind.is_block_device() => "block device",
        _ => "special file",
    };
    Err(Error::new(Kind::InvalidArgument, format!("is a {found}; expected a regular file")).at(path))
}
