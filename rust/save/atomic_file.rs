//! How bytes enter a file: under no name or a temporary one, past the page
//! cache where the file system takes that, and on the disk before the file
//! takes its place.

use super::kernel::FileKernel;
use super::temp_file::TempFile;
use crate::error::{Error, Kind, Result};
use crate::os::file_system::FileSystem;
use crate::source::{BUSY_WAIT, check_local};
use crate::staging::PAGE_BYTES;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Writes that begin and end at multiples of this, in the file and in memory, can go past the page cache.
pub const ALIGNMENT: usize = PAGE_BYTES;

/// A file that is being written. Dropped before it is published, it leaves nothing behind.
pub struct OutputFile {
    /// As the caller named it.
    path: PathBuf,
    temp_file: TempFile,
    kernel: Box<dyn FileKernel>,
    is_direct: AtomicBool,
}

impl OutputFile {
    /// An empty file that will be at `path`.
    ///
    /// # Errors
    /// `file-not-found`, `permission-denied`, `is-a-directory` and `io` from the file system; `invalid-argument` for
    /// what is no path of a file.
    pub fn create(path: &Path, kernel: Box<dyn FileKernel>) -> Result<OutputFile> {
        check_local(path)?;
        if path.file_name().is_none() {
            return Err(Error::new(Kind::InvalidArgument, "has no file name; give the path of a file").at(path));
        }
        let output = OutputFile {
            path: path.to_path_buf(),
            temp_file: TempFile::create(path)?,
            kernel,
            is_direct: AtomicBool::new(false),
        };
        let why = match FileSystem::of(&output.temp_file.file, path)? {
            FileSystem::Memory(name) | FileSystem::Remote(name) => Some(format!("it is on {name}")),
            FileSystem::Local => output.set_direct(true).err().map(|error| error.to_string()),
        };
        tracing::debug!(path = %path.display(), is_direct = why.is_none(), why, "writes");
        Ok(output)
    }

    /// As the caller named the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets aside room for a file of this many bytes, which is to be written whole.
    ///
    /// # Errors
    /// `io` where there is not as much.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let length =
            i64::try_from(bytes).map_err(|_| self.error(&io::Error::from_raw_os_error(libc::EFBIG), "reserve"))?;
        let reserved = repeat(|| self.kernel.reserve(&self.temp_file.file, length));
        match reserved {
            // Threads can write side by side only where the file does not grow.
            Err(error) if is_unsupported(&error) => self.temp_file.file.set_len(bytes),
            reserved => reserved,
        }
        .map_err(|error| self.error(&error, &format!("cannot reserve {bytes} bytes")))
    }

    /// Writes all bytes at `offset`, resuming what was cut short.
    ///
    /// # Errors
    /// `io` with the first byte of the file that could not be written.
    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
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
                    // After a short write the rest may begin anywhere.
                    if !count.is_multiple_of(ALIGNMENT) {
                        self.disable_direct_io()?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(BUSY_WAIT),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && was_direct => {
                    tracing::info!(path = %self.path.display(), "direct writes are refused; through the page cache");
                    self.disable_direct_io()?;
                }
                Err(error) => return Err(self.error(&error, "cannot write").offset(at)),
            }
        }
        Ok(())
    }

    /// Moves `length` bytes from `begin` on towards the end of the file by `distance`, a multiple of [`ALIGNMENT`],
    /// through `buffer`. What is before them then is up to the caller.
    ///
    /// # Errors
    /// `io`.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, buffer: &mut [u8]) -> Result<()> {
        let inserted = i64::try_from(distance).map_err(io::Error::other);
        let inserted = inserted.and_then(|distance| repeat(|| self.kernel.insert(&self.temp_file.file, distance)));
        let Err(why) = inserted else { return Ok(()) };
        tracing::debug!(path = %self.path.display(), %why, length, "nothing can be inserted; the data is moved");
        self.disable_direct_io()?;
        let step = to_u64(buffer.len());
        let mut end = begin.saturating_add(length);
        // From the end on, so that nothing is overwritten that is still to be moved.
        while end > begin {
            let first = end.saturating_sub(step).max(begin);
            let part = usize::try_from(end - first).ok().and_then(|count| buffer.get_mut(..count)).unwrap_or_default();
            let read = self.temp_file.file.read_exact_at(part, first);
            read.map_err(|error| self.error(&error, "cannot read back what was written").offset(first))?;
            self.write(part, first.saturating_add(distance))?;
            end = first;
        }
        Ok(())
    }

    /// Makes the file exactly this long, brings it to the disk, and lets it take the place of what was under its name.
    ///
    /// # Errors
    /// `io`; but for the flush of the directory, what was under the name is as it was.
    pub fn publish(self, length: u64) -> Result<()> {
        let OutputFile { path, temp_file, kernel, .. } = self;
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |error: io::Error| Error::from_io(&error, &path, doing)
        };
        temp_file.file.set_len(length).map_err(failed("cannot give the file its length"))?;
        kernel.flush(&temp_file.file).map_err(failed("cannot flush the file"))?;
        let directory = temp_file.open_directory().map_err(failed("cannot open the directory"))?;
        temp_file.publish().map_err(failed("cannot give the file its name"))?;
        match kernel.flush(&directory) {
            // Not every file system can flush a directory.
            Err(error) if !is_unsupported(&error) => Err(failed("cannot flush the directory")(error)),
            _ => Ok(()),
        }
    }

    fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    fn set_direct(&self, is_direct: bool) -> io::Result<()> {
        self.kernel.set_direct(&self.temp_file.file, is_direct)?;
        self.is_direct.store(is_direct, Ordering::Relaxed);
        Ok(())
    }

    /// From now on through the page cache, which takes any write.
    fn disable_direct_io(&self) -> Result<()> {
        if self.is_direct() {
            self.set_direct(false).map_err(|error| self.error(&error, "cannot turn direct writes off"))?;
        }
        Ok(())
    }

    fn error(&self, error: &io::Error, doing: &str) -> Error {
        Error::from_io(error, &self.path, doing)
    }
}

/// Calls again where a signal came between.
fn repeat<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL))
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
