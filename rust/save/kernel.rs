//! What the kernel does for a file that is written. All that can refuse or
//! fail stands here, behind a trait, so that tests can be the kernel.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// An operating system that files are written with.
pub trait FileKernel: Send + Sync {
    /// Writes some bytes at `offset`: perhaps fewer, perhaps interrupted.
    ///
    /// # Errors
    /// Those of pwrite(2).
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    /// Turns writing past the page cache on or off.
    ///
    /// # Errors
    /// `EINVAL` from file systems that have no such writes.
    fn set_direct(&self, file: &File, is_direct: bool) -> io::Result<()> {
        // SAFETY: asks for the flags of an open descriptor.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = if is_direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        // SAFETY: sets the flags of an open descriptor.
        checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) })
    }

    /// Has the file system set aside room for this many bytes, so that it cannot run out of it later.
    ///
    /// # Errors
    /// `ENOSPC`; `EOPNOTSUPP` from file systems that cannot.
    fn reserve(&self, file: &File, bytes: i64) -> io::Result<()> {
        // SAFETY: no argument points anywhere.
        checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) })
    }

    /// Moves all that a file holds towards its end by whole blocks, without touching the data.
    ///
    /// # Errors
    /// `EOPNOTSUPP` or `EINVAL` from file systems that cannot.
    fn insert(&self, file: &File, bytes: i64) -> io::Result<()> {
        // SAFETY: as above.
        checked(unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_INSERT_RANGE, 0, bytes) })
    }

    /// Brings a file and what is known of it to the disk.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn flush(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }
}

/// This machine's.
#[derive(Debug, Default)]
pub struct Linux;

impl FileKernel for Linux {}

fn checked(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
