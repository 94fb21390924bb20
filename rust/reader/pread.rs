//! Positioned reads through the page cache. They keep no state, so threads share one descriptor.

use super::{ReadLimits, Reader};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::BUSY_WAIT;
use crate::source::Source;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// One positioned read of the operating system, which may be short or interrupted.
pub trait ReadAt: Send + Sync {
    /// Reads some bytes from `offset` and returns their number, 0 at the end of the file.
    ///
    /// # Errors
    /// Those of the operating system.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Returns the path of the file, for errors.
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
                    at = at.saturating_add(to_u64(count));
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
