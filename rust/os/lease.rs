//! Read leases, with which the kernel holds back processes that would change a file.

use super::local_file::LocalFile;
use crate::os::mutex::Mutex;
use libc::c_int;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Commands of fcntl(2) that the crate `libc` lacks.
const F_SETOWN: c_int = 8;
const F_SETSIG: c_int = 10;

/// Open file, of which threads of this process hold a read lease now and then.
#[derive(Debug)]
pub struct LeasedFile {
    file: File,
    /// Number of threads that hold the lease.
    holders: Mutex<usize>,
}

/// Read lease of a file. While a process holds one, no process can open the file for writing or make it shorter.
///
/// A process that tries waits until the lease ends, or until the time in `/proc/sys/fs/lease-break-time` has passed, 45 s by
/// default. A lease is therefore held for a moment only.
#[derive(Debug)]
pub struct ReadLease<'a> {
    leased: &'a LeasedFile,
}

impl LeasedFile {
    /// Opens a file again, whose leases are then its own.
    pub fn open(source: &LocalFile) -> io::Result<LeasedFile> {
        Ok(LeasedFile { file: source.reopen()?, holders: Mutex::new(0) })
    }

    /// Takes a read lease, or shares another thread's.
    ///
    /// # Errors
    /// The kernel's error: a process has the file open for writing, or waits for that; the file belongs to another
    /// user; the file system has no leases.
    pub fn lease(&self) -> io::Result<ReadLease<'_>> {
        let mut holders = self.holders.lock();
        if *holders == 0 {
            self.take()?;
        } else if control(&self.file, libc::F_GETLEASE, 0)? != libc::F_RDLCK {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        *holders += 1;
        Ok(ReadLease { leased: self })
    }

    fn take(&self) -> io::Result<()> {
        // When a process begins to wait for the end of the lease, the kernel sends this signal to the process that took it.
        // By default, SIGURG is ignored, and SIGIO, which it would send otherwise, ends a process. The end of a lease resets
        // the signal.
        control(&self.file, F_SETSIG, libc::SIGURG)?;
        control(&self.file, libc::F_SETLEASE, libc::F_RDLCK)?;
        // A handler for SIGURG is not called either, once nobody is to get the signal. The call cannot fail.
        control(&self.file, F_SETOWN, 0).map(drop)
    }
}

impl Drop for ReadLease<'_> {
    fn drop(&mut self) {
        let mut holders = self.leased.holders.lock();
        *holders -= 1;
        if *holders == 0
            && let Err(error) = control(&self.leased.file, libc::F_SETLEASE, libc::F_UNLCK)
        {
            tracing::debug!(%error, "the lease ends with its file");
        }
    }
}

/// Calls fcntl(2) with a number.
fn control(file: &File, command: c_int, argument: c_int) -> io::Result<c_int> {
    // SAFETY: the commands of this module read and write no memory of the process.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}
