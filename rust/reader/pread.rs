//! Positioned reads through the page cache. They keep no state, so threads share one descriptor.

use super::{ReadLimits, Reader};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::local_file::LocalFile;
use crate::os::retry::{Check, read_full};
use crate::plan::Read;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// One positioned read of the operating system, which may be short or interrupted.
pub trait ReadAt: Send + Sync {
    /// Reads some bytes from `offset` and returns their number, 0 at the end of the file.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Returns the path of the file, for errors.
    fn path(&self) -> &Path;
}

impl ReadAt for Arc<LocalFile> {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        <File as FileExt>::read_at(&self.file, into, offset)
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// Reader that uses `pread(2)`.
pub struct PreadReader<F> {
    file: F,
}

impl<F: ReadAt> PreadReader<F> {
    /// Creates a reader of `file`.
    pub fn new(file: F) -> Self {
        PreadReader { file }
    }
}

impl<F: ReadAt> Reader for PreadReader<F> {
    fn limits(&self) -> ReadLimits {
        ReadLimits::BUFFERED
    }

    fn divides(&self, _: &[Read]) -> bool {
        true
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        let failed = |error, at| Error::from_io(error, self.file.path(), "cannot read").offset(at);
        let count = read_full(|into, at| self.file.read_at(into, at), offset, into, check, failed)?;
        let missing = into.len() - count;
        if missing > 0 {
            let message = format!("the file ended {missing} bytes early; it became shorter while it was loaded");
            let at = offset.saturating_add(to_u64(count));
            return Err(Error::new(Kind::Io, message).at(self.file.path()).offset(at));
        }
        Ok(())
    }
}
