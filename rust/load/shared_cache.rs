//! Identity of the page cache that serves the files of a checkpoint.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::reader::{self, Access, ReaderKind};
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Changes with each boot of the kernel. It is equal in all containers on a machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns a name for the page cache of the files, which is equal in all processes of a machine that have opened the
/// same files.
///
/// Returns `None` if a load would not map the files: they may not stay in the page cache, or this machine may not have
/// them alone.
///
/// # Errors
/// `io` if a file cannot be examined.
pub fn name(checkpoint: &Checkpoint, options: &Options) -> Result<Option<String>> {
    let Ok(mut name) = fs::read_to_string(BOOT_ID) else { return Ok(None) };
    for source in checkpoint.sources() {
        if reader::choose(options, source, Access::View)?.kind != ReaderKind::Mmap {
            return Ok(None);
        }
        let Some(file) = source.file() else { return Ok(None) };
        let metadata = file.file.metadata().map_err(|error| Error::from_io(error, &file.path, "cannot examine"))?;
        let _ = write!(name, " {}:{}", metadata.dev(), metadata.ino());
    }
    Ok(Some(name))
}
