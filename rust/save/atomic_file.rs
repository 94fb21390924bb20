//! Output file that appears at its path atomically. Bytes go to a file without a name or with a temporary name, past the
//! page cache if the file system supports direct I/O, and are flushed before the file is renamed.

use super::file_kernel::FileKernel;
use super::temp_file::{Target, TempFile};
use crate::error::{Error, Result};
use crate::num::to_u64;
use crate::os::file_system::FileSystem;
use crate::os::retry::{self, Check, read_full, repeat};
use crate::staging::PAGE_BYTES;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Alignment of direct writes in bytes: of the offset, the address and the length.
pub const ALIGNMENT: usize = PAGE_BYTES;

/// Message of the only errors after which the new file is at its path.
const NOT_FLUSHED: &str = "the new file is complete and has this name, but a power failure may still undo its rename, \
                           because the directory cannot be flushed";

/// File that is being written. Dropping it before it is published leaves no file behind.
pub struct OutputFile {
    /// Path as the caller passed it.
    path: PathBuf,
    temp_file: TempFile,
    kernel: Box<dyn FileKernel>,
    is_direct: AtomicBool,
}

impl OutputFile {
    /// Creates an empty file that [`publish`](OutputFile::publish) renames to `path`.
    ///
    /// # Errors
    /// `file-not-found`, `permission-denied`, `is-a-directory` and `io` from the file system; `invalid-argument` if
    /// `path` cannot be the path of a file.
    pub fn create(path: &Path, kernel: Box<dyn FileKernel>) -> Result<OutputFile> {
        OutputFile::create_like(path, None, kernel)
    }

    /// Creates a file like [`create`](OutputFile::create). If no file is at `path`, the new one gets the owner and
    /// permissions of `model`, if that exists.
    ///
    /// # Errors
    /// Those of [`create`](OutputFile::create).
    pub fn create_like(path: &Path, model: Option<&Path>, kernel: Box<dyn FileKernel>) -> Result<OutputFile> {
        let output = OutputFile {
            path: path.to_path_buf(),
            temp_file: TempFile::create(path, model)?,
            kernel,
            is_direct: AtomicBool::new(false),
        };
        let refusal = match FileSystem::of(&output.temp_file.file, path)? {
            FileSystem::Memory(name) | FileSystem::Remote(name) => Some(format!("it is on {name}")),
            FileSystem::Local => output.set_direct(true).err().map(|error| error.to_string()),
        };
        tracing::debug!(path = %path.display(), is_direct = refusal.is_none(), refusal, "created an output file");
        Ok(output)
    }

    /// Returns the path as the caller passed it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reserves disk space for a file of `bytes` bytes.
    ///
    /// # Errors
    /// `io` if the disk has too little space; that of `check`, which is called before a call is repeated.
    pub fn reserve(&self, bytes: u64, check: Check<'_>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if i64::try_from(bytes).is_err() {
            return Err(self.error(Errno::FBIG.into(), "reserve"));
        }
        let reserved = repeat(check, || self.kernel.reserve(&self.temp_file.file, bytes))?;
        match reserved {
            // Threads can write in parallel only while the file does not grow.
            Err(error) if is_unsupported(&error) => self.temp_file.file.set_len(bytes),
            reserved => reserved,
        }
        .map_err(|error| self.error(error, &format!("cannot reserve {bytes} bytes")))
    }

    /// Writes all bytes at `offset`, and resumes after short writes.
    ///
    /// # Errors
    /// `io` with the first byte of the file that could not be written; that of `check`, which is called before a call is
    /// repeated.
    pub fn write(&self, bytes: &[u8], offset: u64, check: Check<'_>) -> Result<()> {
        let is_aligned = [bytes.as_ptr().addr(), bytes.len()].iter().all(|number| number.is_multiple_of(ALIGNMENT))
            && offset.is_multiple_of(to_u64(ALIGNMENT));
        if !is_aligned {
            self.disable_direct_io()?;
        }
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let was_direct = self.is_direct();
            let result = match self.kernel.write_at(&self.temp_file.file, rest, at) {
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
    ///
    /// # Errors
    /// `io`; that of `check`, which is called before a call is repeated.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, buffer: &mut [u8], check: Check<'_>) -> Result<()> {
        let inserted = repeat(check, || self.kernel.insert(&self.temp_file.file, distance))?;
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
            let read_at = |chunk: &mut [u8], at| self.temp_file.file.read_at(chunk, at);
            if read_full(read_at, first, chunk, check, failed)? < chunk.len() {
                return Err(failed(io::ErrorKind::UnexpectedEof.into(), first));
            }
            self.write(chunk, first.saturating_add(distance), check)?;
            end = first;
        }
        Ok(())
    }

    /// Truncates the file to `length` bytes, flushes it to the disk, and renames it to its path.
    ///
    /// # Errors
    /// `io`, with an existing file at the path unchanged, unless the message says that the new file has replaced it; that
    /// of `check`, which is called before a call is repeated.
    pub fn publish(self, length: u64, check: Check<'_>) -> Result<()> {
        let OutputFile { path, temp_file, kernel, .. } = self;
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |error: io::Error| Error::from_io(error, &path, doing)
        };
        temp_file.file.set_len(length).map_err(failed("cannot set the length of the file"))?;
        repeat(check, || kernel.flush(&temp_file.file))?.map_err(failed("cannot flush the file"))?;
        let directory = temp_file.open_directory().map_err(failed("cannot open the directory"))?;
        temp_file.publish().map_err(failed("cannot rename the file to its path"))?;
        flush_directory(&directory, &path, &*kernel, check)
    }

    fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    fn set_direct(&self, is_direct: bool) -> io::Result<()> {
        self.kernel.set_direct(&self.temp_file.file, is_direct)?;
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

/// Checks that a save can create or replace the file at `path`.
///
/// # Errors
/// Those of [`OutputFile::create`], except for the directory.
pub fn check_target(path: &Path) -> Result<()> {
    Target::open(path).map(|_| ())
}

/// Gives the complete file `source` the name `path`, too, atomically replacing an existing file, and flushes the
/// directory. On file systems without hard links, renames `source`.
///
/// # Errors
/// Those of [`check_target`]; `io`; that of `check`, which is called before a call is repeated.
pub fn link(source: &Path, path: &Path, kernel: &dyn FileKernel, check: Check<'_>) -> Result<()> {
    let target = Target::open(path)?;
    let linked = target.link(source, kernel).and_then(|()| target.open_directory());
    let directory = linked.map_err(|error| Error::from_io(error, path, "cannot give the file its name"))?;
    flush_directory(&directory, path, kernel, check)
}

/// Flushes the directory in which a file has been given its name `path`.
fn flush_directory(directory: &File, path: &Path, kernel: &dyn FileKernel, check: Check<'_>) -> Result<()> {
    match repeat(check, || kernel.flush(directory)) {
        Err(interruption) => Err(Error::new(interruption.kind(), NOT_FLUSHED).at(path)),
        // Not every file system can flush a directory.
        Ok(Err(error)) if !is_unsupported(&error) => Err(Error::from_io(error, path, NOT_FLUSHED)),
        Ok(_) => Ok(()),
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL))
}
