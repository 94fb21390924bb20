//! File that is written past the page cache if its file system supports direct I/O.

use super::file_kernel::FileKernel;
use crate::error::{Error, Result};
use crate::num::to_u64;
use crate::os::file_system::{FileSystem, is_unsupported, set_length};
use crate::os::local_file::open_regular_for_writes;
use crate::os::retry::{self, Check, read_full, repeat};
use crate::staging::PAGE_BYTES;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Alignment of direct writes in bytes: of the offset, the address and the length.
pub const ALIGNMENT: usize = PAGE_BYTES;

/// Open file that is being written.
pub struct DirectFile {
    /// Path as errors show it.
    path: PathBuf,
    file: Arc<File>,
    kernel: Box<dyn FileKernel>,
    is_direct: AtomicBool,
    /// Whether the length can be set before the first write. Only writes set it on some mounts.
    has_length: OnceLock<bool>,
}

impl DirectFile {
    /// Turns direct I/O on for an open file, if its file system supports that.
    pub fn new(path: &Path, file: Arc<File>, kernel: Box<dyn FileKernel>) -> DirectFile {
        let (path_buf, is_direct, has_length) = (path.to_path_buf(), AtomicBool::new(false), OnceLock::new());
        let file = DirectFile { path: path_buf, file, kernel, is_direct, has_length };
        let refusal = match FileSystem::of(&file.file) {
            FileSystem::Memory(name) | FileSystem::Remote(name) => Some(format!("it is on {name}")),
            FileSystem::Local => file.set_direct(true).err().map(|error| error.to_string()),
        };
        tracing::debug!(path = %path.display(), is_direct = refusal.is_none(), refusal, "opened an output file");
        file
    }

    /// Opens an existing file of any content. Waits while a process that reads it holds a lease.
    pub fn open(path: &Path, kernel: Box<dyn FileKernel>, check: Check<'_>) -> Result<DirectFile> {
        let file = open_regular_for_writes(path, check)?;
        Ok(DirectFile::new(path, Arc::new(file), kernel))
    }

    /// Closes the file, unless another part of the program has it open.
    pub(super) fn close(self) -> (PathBuf, Box<dyn FileKernel>) {
        (self.path, self.kernel)
    }

    /// Returns the path as errors show it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reserves disk space for a file of `bytes` bytes, unless the mount could not cut the file to a shorter length later.
    ///
    /// # Errors
    /// `io` if the disk has too little space; the error of `check`, which is called before a call is repeated.
    pub fn reserve(&self, bytes: u64, check: Check<'_>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if i64::try_from(bytes).is_err() {
            return Err(self.error(Errno::FBIG.into(), "reserve"));
        }
        let has_length = self.has_length.get_or_init(|| {
            let unchanged = self.file.metadata().and_then(|found| self.file.set_len(found.len()));
            !unchanged.is_err_and(|refusal| {
                tracing::debug!(path = %self.path.display(), %refusal, "the length cannot be set; writes set it");
                is_unsupported(&refusal)
            })
        });
        if !has_length {
            return self.disable_direct_io();
        }
        let reserved = repeat(check, || self.kernel.reserve(&self.file, bytes))?;
        match reserved {
            // Threads can write in parallel only while the file does not grow.
            Err(error) if is_unsupported(&error) => self.file.set_len(bytes),
            reserved => reserved,
        }
        .map_err(|error| self.error(error, &format!("cannot reserve {bytes} bytes")))
    }

    /// Writes all bytes at `offset`, and resumes after short writes.
    ///
    /// # Errors
    /// `io` with the first byte of the file that could not be written; the error of `check`, which is called before a
    /// call is repeated.
    pub fn write(&self, bytes: &[u8], offset: u64, check: Check<'_>) -> Result<()> {
        let is_aligned = [bytes.as_ptr().addr(), bytes.len()].iter().all(|number| number.is_multiple_of(ALIGNMENT))
            && offset.is_multiple_of(to_u64(ALIGNMENT));
        if !is_aligned {
            self.disable_direct_io()?;
        }
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let was_direct = self.is_direct();
            let result = match self.kernel.write_at(&self.file, rest, at) {
                Ok(0) => Err(io::Error::from(io::ErrorKind::WriteZero)),
                result => result,
            };
            match result {
                Ok(count) => {
                    at = at.saturating_add(to_u64(count));
                    rest = rest.get(count..).unwrap_or_default();
                    // After a short write the remaining bytes may be unaligned.
                    if !count.is_multiple_of(ALIGNMENT) {
                        self.disable_direct_io()?;
                    }
                }
                Err(error) if retry::prepare(&error, check)? => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) && was_direct => {
                    tracing::info!(path = %self.path.display(), "direct writes are refused; writing through the page cache");
                    self.disable_direct_io()?;
                }
                Err(error) => return Err(self.error(error, "cannot write").offset(at)),
            }
        }
        Ok(())
    }

    /// Moves `length` bytes at `begin` towards the end of the file by `distance`, a multiple of [`ALIGNMENT`].
    ///
    /// Uses `buffer` if the file system cannot insert blocks. The bytes before the moved range are unspecified.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, buffer: &mut [u8], check: Check<'_>) -> Result<()> {
        let inserted = repeat(check, || self.kernel.insert(&self.file, distance))?;
        let Err(refusal) = inserted else { return Ok(()) };
        tracing::debug!(path = %self.path.display(), %refusal, length, "cannot insert blocks; moving the data");
        self.disable_direct_io()?;
        let step = to_u64(buffer.len());
        let mut end = begin.saturating_add(length);
        // Moves the last bytes first, so that no byte is overwritten before it has moved.
        while end > begin {
            let first = end.saturating_sub(step).max(begin);
            let chunk = usize::try_from(end - first).ok().and_then(|count| buffer.get_mut(..count)).unwrap_or_default();
            let failed = |error, at| self.error(error, "cannot read back the written data").offset(at);
            let read_at = |chunk: &mut [u8], at| self.file.read_at(chunk, at);
            if read_full(read_at, first, chunk, check, failed)? < chunk.len() {
                return Err(failed(io::ErrorKind::UnexpectedEof.into(), first));
            }
            self.write(chunk, first.saturating_add(distance), check)?;
            end = first;
        }
        Ok(())
    }

    /// Sets the length of the file to `length` bytes.
    pub fn set_length(&self, length: u64) -> Result<()> {
        set_length(&self.file, length).map_err(|error| self.error(error, "cannot set the length of the file"))
    }

    /// Flushes the file to the disk, if its file system can.
    pub fn flush(&self, check: Check<'_>) -> Result<()> {
        flush(&self.file, &*self.kernel, check)?.map_err(|error| self.error(error, "cannot flush the file"))
    }

    /// Returns whether writes bypass the page cache, in whole blocks.
    pub fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    fn set_direct(&self, is_direct: bool) -> io::Result<()> {
        self.kernel.set_direct(&self.file, is_direct)?;
        self.is_direct.store(is_direct, Ordering::Relaxed);
        Ok(())
    }

    /// Turns direct I/O off. Later writes go through the page cache, which accepts any alignment.
    fn disable_direct_io(&self) -> Result<()> {
        if self.is_direct() {
            self.set_direct(false).map_err(|error| self.error(error, "cannot turn direct writes off"))?;
        }
        Ok(())
    }

    fn error(&self, error: io::Error, doing: &str) -> Error {
        Error::from_io(error, &self.path, doing)
    }
}

/// Flushes a file or a directory. Not every file system can.
pub(super) fn flush(file: &File, kernel: &dyn FileKernel, check: Check<'_>) -> Result<io::Result<()>> {
    let flushed = repeat(check, || kernel.flush(file))?;
    if let Err(error) = &flushed
        && is_unsupported(error)
    {
        tracing::info!(%error, "the file system cannot flush; a power failure may lose the file");
        return Ok(Ok(()));
    }
    Ok(flushed)
}
