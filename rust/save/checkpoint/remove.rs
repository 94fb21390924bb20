//! Removal of files on local and network file systems.

use crate::error::{Error, Result};
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Errors with which file systems refuse to remove open files.
const REFUSALS_WHILE_OPEN: [io::ErrorKind; 3] =
    [io::ErrorKind::ResourceBusy, io::ErrorKind::ExecutableFileBusy, io::ErrorKind::PermissionDenied];
/// Pauses before a file that is still open is removed again.
const CLOSE_PAUSES: [Duration; 3] = [Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(100)];

/// Removes a local file. Returns whether it was there.
pub(super) fn remove_file(path: &Path) -> Result<bool> {
    let mut pauses = CLOSE_PAUSES.iter();
    loop {
        match (fs::remove_file(path), pauses.next()) {
            (Ok(()), _) => return Ok(true),
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            // Network and FUSE file systems that do not remove open files may close a file after close(2) has returned.
            (Err(error), Some(&pause)) if REFUSALS_WHILE_OPEN.contains(&error.kind()) => thread::sleep(pause),
            (Err(error), _) => return Err(Error::from_io(error, path, "cannot remove")),
        }
    }
}
