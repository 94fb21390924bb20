//! Lock of a running save, by which later saves and `fst clean` recognize the files of a process that has ended.

use super::log_failure;
use super::names::{NameOfSave, new_token};
use super::remove::remove_file;
use crate::error::{Error, Result};
use crate::os::file_lock::FileLock;
use crate::save::file_kernel::FileKernel;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Lock on an empty file. The kernel releases it when the process ends, on NFS also for other machines.
pub(super) struct SaveLock {
    path: PathBuf,
    /// Whether the file system has hard links.
    pub(super) has_links: bool,
    /// `None` on a file system without locks, where other processes cannot lock the file either.
    lock: Option<FileLock>,
}

impl SaveLock {
    /// Creates the lock of a save of the checkpoint at a path. Returns the token, too.
    pub(super) fn create(directory: &Path, stem: &str, kernel: &dyn FileKernel) -> Result<(SaveLock, String)> {
        loop {
            let token = new_token()?;
            let path = directory.join(NameOfSave { stem, token: &token }.lock());
            let failed = |error| Error::from_io(error, &path, "cannot create");
            match open(&path, OpenOptions::new().create_new(true).mode(0o600)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                opened => drop(opened.map_err(failed)?),
            }
            let has_links = can_be_linked(&path, directory, stem, kernel);
            let file = match open(&path, &mut OpenOptions::new()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => Arc::new(opened.map_err(failed)?),
            };
            let lock = FileLock::try_exclusive(&file).ok();
            // A process that removes stale files may have come in between.
            if file.metadata().map_err(failed)?.nlink() > 0 {
                return Ok((SaveLock { path, has_links, lock }, token));
            }
        }
    }

    /// Ends the lock. The file stays if temporary files of the save do.
    pub(super) fn release(self, leaves_files: bool) {
        // As `remove_file` says, some file systems do not remove open files.
        drop(self.lock);
        if !leaves_files {
            log_failure(remove_file(&self.path).map(drop));
        }
    }
}

/// Returns whether a second name can be given to a file that is not open, and be removed.
fn can_be_linked(path: &Path, directory: &Path, stem: &str, kernel: &dyn FileKernel) -> bool {
    let link = || {
        let name = NameOfSave { stem, token: &new_token().ok()? }.lock();
        kernel.link(path, File::open(directory).ok()?.as_fd(), name.as_ref()).ok()?;
        remove_file(&directory.join(name)).ok()
    };
    link().is_some()
}

/// Locks an existing file. Returns `None` if there is none, or if a process has a lock on it.
pub(super) fn try_lock(path: &Path) -> Option<FileLock> {
    FileLock::try_exclusive(&Arc::new(open(path, &mut OpenOptions::new()).ok()?)).ok()
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Locks over NFS need a file that is open for writing.
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}
