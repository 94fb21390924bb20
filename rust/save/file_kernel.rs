//! System calls of a save that a file system or a container may refuse, behind a trait that tests implement. It is
//! separate from [`RingKernel`](crate::reader::ring::RingKernel), since loads and saves share no call.

use rustix::fs::{AtFlags, CWD, FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl, fsync, linkat, renameat};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// System calls on a file that is being written.
pub trait FileKernel: Send + Sync {
    /// Writes bytes at `offset` and returns their number. A write may be short or interrupted.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    /// Turns direct I/O on or off. Fails with `EINVAL` from file systems without direct I/O.
    fn set_direct(&self, file: &File, is_direct: bool) -> io::Result<()> {
        let mut flags = fcntl_getfl(file)?;
        flags.set(OFlags::DIRECT, is_direct);
        Ok(fcntl_setfl(file, flags)?)
    }

    /// Reserves disk space for `bytes` bytes, so that later writes do not run out of it. Fails with `ENOSPC`;
    /// `EOPNOTSUPP` from file systems that cannot reserve space.
    fn reserve(&self, file: &File, bytes: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::empty(), 0, bytes)?)
    }

    /// Inserts `bytes` bytes, a multiple of the block size, at the start of the file without copying its data. Fails
    /// with `EOPNOTSUPP` or `EINVAL` from file systems that cannot insert blocks.
    fn insert(&self, file: &File, bytes: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::INSERT_RANGE, 0, bytes)?)
    }

    /// Gives the file `source` a second name, in a directory. Fails with `EPERM` or `EOPNOTSUPP` from file systems
    /// without hard links.
    fn link(&self, source: &Path, directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        Ok(linkat(CWD, source, directory, name, AtFlags::empty())?)
    }

    /// Moves a file from a name in one directory to a name in another one, where it replaces an older file.
    fn rename(&self, from: BorrowedFd<'_>, old: &OsStr, to: BorrowedFd<'_>, new: &OsStr) -> io::Result<()> {
        Ok(renameat(from, old, to, new)?)
    }

    /// Flushes a file and its metadata to the disk.
    fn flush(&self, file: &File) -> io::Result<()> {
        Ok(fsync(file)?)
    }
}

/// System calls of Linux.
#[derive(Debug, Default)]
pub struct Linux;

impl FileKernel for Linux {}
