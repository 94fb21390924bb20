//! Files of a checkpoint, from the path of a file, of a directory, or of the index file of a sharded checkpoint.

mod index;

use crate::error::{Error, Kind, Result};
use rustix::fs::{Advice, Mode, OFlags, fadvise, fcntl_setfl, open};
use rustix::io::retry_on_intr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Suffix of the index file of a sharded checkpoint, a convention of the Hugging Face libraries.
const INDEX_SUFFIX: &str = ".safetensors.index.json";
const FILE_SUFFIX: &str = ".safetensors";
/// Upper bound for an index file, in bytes, the same as for a header. Real ones are far smaller.
pub const INDEX_BYTES_MAX: u64 = 100_000_000;

/// Files of a checkpoint.
#[derive(Debug, Default)]
pub struct Files {
    /// Paths of the files, in the caller's order. The files of a directory are sorted by name.
    pub paths: Vec<PathBuf>,
    /// Entries of all index files.
    pub index_entries: Vec<IndexEntry>,
}

/// Entry of an index file.
#[derive(Debug)]
pub struct IndexEntry {
    /// Name of a tensor.
    pub name: String,
    /// Index in [`Files::paths`] of the file with the tensor.
    pub file: usize,
    /// Path of the index file.
    pub index: Arc<Path>,
}

impl Files {
    /// Resolves paths to files. Opens only index files.
    ///
    /// # Errors
    /// `file-not-found`, `permission-denied` or `io` from the file system; `is-a-directory` for a directory without
    /// safetensors files; `malformed` for an invalid index; `invalid-argument` for a URL or an empty list.
    pub fn resolve<P: AsRef<Path>>(paths: &[P]) -> Result<Files> {
        if paths.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "no path was given; give at least one file"));
        }
        let mut files = Files::default();
        for path in paths {
            files.add(path.as_ref())?;
        }
        Ok(files)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        check_local(path)?;
        let kind = fs::metadata(path).map_err(|error| Error::from_io(error, path, "cannot open"))?;
        if kind.is_dir() {
            self.add_directory(path)
        } else if file_name(path).ends_with(INDEX_SUFFIX) {
            self.add_index(path)
        } else {
            self.paths.push(path.to_path_buf());
            Ok(())
        }
    }

    fn add_directory(&mut self, directory: &Path) -> Result<()> {
        let failed = |error: io::Error| Error::from_io(error, directory, "cannot list");
        let mut shards = Vec::new();
        let mut indexes = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = file_name(&path);
            if name.ends_with(INDEX_SUFFIX) {
                indexes.push(path);
            } else if name.ends_with(FILE_SUFFIX) {
                shards.push(path);
            }
        }
        // A directory may contain several variants. The one without a suffix is the default.
        let plain = directory.join(format!("model{INDEX_SUFFIX}"));
        if indexes.contains(&plain) {
            return self.add_index(&plain);
        }
        match indexes.as_slice() {
            [index] => self.add_index(index),
            [] if shards.is_empty() => Err(Error::new(
                Kind::IsADirectory,
                format!("this directory holds no *{FILE_SUFFIX} file; give the path of a file or of a checkpoint"),
            )
            .at(directory)),
            [] => {
                shards.sort();
                self.paths.append(&mut shards);
                Ok(())
            }
            _ => Err(Error::new(
                Kind::InvalidArgument,
                format!("this directory holds {} index files; give the path of one of them", indexes.len()),
            )
            .at(directory)),
        }
    }

    fn add_index(&mut self, index: &Path) -> Result<()> {
        let (file, metadata) = open_regular(index)?;
        let length = metadata.len();
        if length > INDEX_BYTES_MAX {
            let message = format!("the index has {length} bytes; at most {INDEX_BYTES_MAX} are accepted");
            return Err(Error::new(Kind::Malformed, message).at(index));
        }
        // A file that grows meanwhile is read only up to its length at the start.
        let shards = index::read(file.take(length)).map_err(|fault| fault.at(index))?;
        let path: Arc<Path> = Arc::from(index);
        let directory = index.parent().unwrap_or(Path::new(""));
        for (file, names) in shards {
            let position = self.paths.len();
            self.index_entries.extend(names.into_iter().map(|name| IndexEntry {
                name,
                file: position,
                index: Arc::clone(&path),
            }));
            self.paths.push(directory.join(file));
        }
        Ok(())
    }
}

/// Open file of a checkpoint.
#[derive(Debug)]
pub struct Source {
    /// Path, as the caller gave it.
    pub path: PathBuf,
    /// Kept open for the whole load: if the path is replaced, the load reads the file whose header was checked.
    pub file: File,
    /// Length in bytes when the file was opened.
    pub length: u64,
}

impl Source {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of the file system, with the path.
    pub fn open(path: &Path) -> Result<Source> {
        let (file, metadata) = open_regular(path)?;
        let length = metadata.len();
        // Reads are planned, so the readahead of the kernel would only read unused bytes.
        if let Err(error) = fadvise(&file, 0, None, Advice::Random) {
            tracing::debug!(path = %path.display(), %error, "fadvise failed");
        }
        Ok(Source { path: path.to_path_buf(), file, length })
    }

    /// Opens the file again with O_DIRECT. Does not use its path, which may name another file by now.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn reopen_direct(&self) -> io::Result<File> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        Ok(File::from(retry_on_intr(|| open(&*own, flags, Mode::empty()))?))
    }
}

/// Opens a regular file for reading, and returns its metadata. Neither a FIFO nor a device blocks the call.
///
/// # Errors
/// Those of the file system; `is-a-directory`, or `invalid-argument` for anything else that is not a regular file.
pub fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    let failed = |error: io::Error| Error::from_io(error, path, "cannot open");
    // Opening a device may have effects. This check avoids them, and the second one cannot be outrun by a rename.
    check_regular(path, &fs::metadata(path).map_err(failed)?)?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = retry_on_intr(|| open(path, flags, Mode::empty()));
    let file = File::from(opened.map_err(|error| failed(error.into()))?);
    let metadata = file.metadata().map_err(failed)?;
    check_regular(path, &metadata)?;
    // The kernel passes the flag on to FUSE file systems, which may then refuse to wait for data.
    fcntl_setfl(&file, OFlags::empty()).map_err(|error| failed(error.into()))?;
    Ok((file, metadata))
}

/// Checks that the metadata of a path are those of a regular file.
///
/// # Errors
/// `is-a-directory`; `invalid-argument` for a FIFO, a socket or a device.
pub fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    let kind = metadata.file_type();
    let found = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => {
            return Err(Error::new(Kind::IsADirectory, "is a directory; expected a regular file").at(path));
        }
        _ if kind.is_fifo() => "FIFO",
        _ if kind.is_socket() => "socket",
        _ if kind.is_char_device() => "character device",
        _ if kind.is_block_device() => "block device",
        _ => "special file",
    };
    Err(Error::new(Kind::InvalidArgument, format!("is a {found}; expected a regular file")).at(path))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Checks that a path can be that of a local file.
///
/// # Errors
/// `invalid-argument` for a URL or a path with a NUL byte.
pub fn check_local(path: &Path) -> Result<()> {
    let refused = |message: String| Err(Error::new(Kind::InvalidArgument, message).at(path));
    if let Some(scheme) = url_scheme(path) {
        return refused(format!("the scheme {scheme:?} is not built in; give the path of a local file or directory"));
    }
    if path.as_os_str().as_bytes().contains(&0) {
        return refused("a path cannot contain a NUL byte".into());
    }
    Ok(())
}

/// Returns the scheme of a URL: letters, digits, `+`, `-` and `.` before `://`.
fn url_scheme(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let is_scheme =
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
    is_scheme.then(|| scheme.to_owned())
}
