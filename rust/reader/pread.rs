//! Positioned reads: no state between them, so threads share one descriptor.

use super::Reader;
use crate::error::{Error, Kind, Result};
use crate::source::{BUSY_WAIT, Source};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// One positioned read, as the operating system does it: perhaps short, perhaps interrupted.
pub trait ReadAt: Send + Sync {
    /// Reads some bytes from `offset` on; 0 at the end of the file.
    ///
    /// # Errors
    /// Those of the operating system.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;
    /// The file's name for errors.
    fn path(&self) -> &Path;
}

impl ReadAt for Arc<Source> {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        <File as FileExt>::read_at(&self.file, into, offset)
    }
    fn path(&self) -> &Path {
        &self.path
    }
}

/// A reader on `pread(2)`.
pub struct PreadReader<F> {
    file: F,
}

impl<F: ReadAt> PreadReader<F> {
    /// A reader of `file`.
    pub fn new(file: F) -> Self {
        PreadReader { file }
    }
}

impl<F: ReadAt> Reader for PreadReader<F> {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            match self.file.read_at(rest, at) {
                Ok(0) => {
                    let message =
                        format!("the file ended {} bytes early; it became shorter while it was loaded", rest.len());
                    return Err(Error::new(Kind::Io, message).at(self.file.path()).offset(at));
                }
                Ok(count) => {
                    at = at.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
                    rest = rest.get_mut(count..).unwrap_or_default();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(BUSY_WAIT),
                Err(error) => return Err(Error::from_io(error, self.file.path(), "cannot read").offset(at)),
            }
        }
        Ok(())
    }
}
