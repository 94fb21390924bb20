//! Opens the files of a checkpoint while a save may replace it.
//!
//! A save replaces the index before it touches a file that the index names. If the index has not changed once all files
//! are open, they belong to one save. Otherwise they are opened again.

use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use crate::source::files::Files;
use std::thread;
use std::time::Duration;

/// Number of times that files are opened. A save replaces an index twice.
const TRIES_MAX: u32 = 50;
/// Pause before the second try. Every try adds as much.
const PAUSE: Duration = Duration::from_millis(1);

/// Opens the files that `resolve` finds, all of one save. Fails with `source-changed` if saves replace the checkpoint
/// again and again.
pub(super) fn open_files<T>(
    resolve: impl Fn() -> Result<Files>,
    open: impl Fn(Files) -> Result<T>,
    check: Check<'_>,
) -> Result<T> {
    for attempt in 0..TRIES_MAX {
        thread::sleep(PAUSE * attempt);
        check()?;
        let mut files = resolve()?;
        let versions = std::mem::take(&mut files.versions);
        let opened = open(files);
        if versions.iter().all(|version| version.is_current(opened.is_ok(), check)) {
            return opened;
        }
    }
    let message = "the checkpoint was replaced again and again while its files were opened; load it when no save runs";
    Err(Error::new(Kind::SourceChanged, message))
}
