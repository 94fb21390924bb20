//! Locks on whole files (flock(2)), which show other processes that a file is in use.

use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use std::fs::File;
use std::io;
use std::process;
use std::sync::Arc;

/// Exclusive lock on a file. Dropping it releases the lock.
///
/// A forked child shares the open file and so the lock, which would last until the child ends. The process that took the
/// lock therefore releases it explicitly. Dropping a copy in the child changes nothing.
#[derive(Debug)]
pub struct FileLock {
    file: Arc<File>,
    process: u32,
}

impl FileLock {
    /// Locks a file without waiting. Fails with `WouldBlock` if the file is locked elsewhere.
    pub fn try_exclusive(file: &Arc<File>) -> io::Result<FileLock> {
        retry_on_intr(|| flock(file, FlockOperation::NonBlockingLockExclusive))?;
        Ok(FileLock { file: Arc::clone(file), process: process::id() })
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.process == process::id()
            && let Err(error) = flock(&self.file, FlockOperation::Unlock)
        {
            tracing::debug!(%error, "the lock lasts until the file is closed");
        }
    }
}
