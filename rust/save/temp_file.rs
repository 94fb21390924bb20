//! A file without its name yet. Until it takes the place of the one that it is
//! to become, that one is as it was.
//!
//! Where the file system has files without any name (`O_TMPFILE`), a draft is
//! one, and a killed process leaves nothing behind. It gets a temporary name
//! for a moment all the same, since a link cannot replace a file as a rename
//! can. Elsewhere a draft has that name from the beginning:
//! `.<name>.<process>-<number>.fst-tmp`, beside the file.

use crate::error::{Error, Kind, Result};
use std::ffi::{CString, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// As many links as Linux itself follows.
const LINKS_MAX: usize = 40;
/// The longest name that Linux file systems take, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// As a new file has it before the process's umask.
const MODE: u32 = 0o666;
/// What may be kept of a file's mode: the bits for reading, writing and executing.
const MODE_MASK: u32 = 0o7777;

/// A file that is being written.
pub struct TempFile {
    /// To read and write.
    pub file: File,
    /// Where the file will be: what the caller named, with links followed.
    target: PathBuf,
    /// The temporary name, while there is one.
    temporary: Option<PathBuf>,
}

impl TempFile {
    /// An empty draft for `path`.
    ///
    /// # Errors
    /// What a person gets who opens the path to write: `file-not-found` for a directory that does not exist,
    /// `permission-denied`, `is-a-directory`; `invalid-argument` where something stands that is no file.
    pub fn create(path: &Path) -> Result<TempFile> {
        let failed = |error: &io::Error| Error::from_io(error, path, "cannot create");
        let target = follow(path).map_err(|error| failed(&error))?;
        let before = match fs::metadata(&target) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(&error)),
        };
        if let Some(before) = &before {
            if before.is_dir() {
                return Err(Error::new(Kind::IsADirectory, "is a directory; give the path of a file").at(path));
            }
            if !before.is_file() {
                return Err(
                    Error::new(Kind::InvalidArgument, "is not a regular file, which alone is replaced").at(path)
                );
            }
            // To rename over a file one needs no right to write it; to overwrite it, as it is meant, one does.
            OpenOptions::new().write(true).open(&target).map_err(|error| failed(&error))?;
        }
        let mut temp_file = match create_unnamed(directory_of(&target)) {
            Ok(file) => TempFile { file, target, temporary: None },
            Err(why) => {
                tracing::debug!(path = %path.display(), %why, "no files without a name; a temporary one");
                let (temporary, file) = at_temporary_name(&target, |name| {
                    OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(name)
                })
                .map_err(|error| failed(&error))?;
                TempFile { file, target, temporary: Some(temporary) }
            }
        };
        if let Some(before) = before {
            temp_file.resemble(&before);
        }
        Ok(temp_file)
    }

    /// Has owner and permissions of the file that it will replace, as if that one had been written to. Not everyone
    /// may give a file away; it is the writer's then.
    fn resemble(&mut self, before: &Metadata) {
        let like = |(uid, gid)| std::os::unix::fs::fchown(&self.file, uid, gid);
        let is_other = self.file.metadata().is_ok_and(|own| (own.uid(), own.gid()) != (before.uid(), before.gid()));
        let owned = if is_other { like((Some(before.uid()), Some(before.gid()))) } else { Ok(()) };
        let permissions = fs::Permissions::from_mode(before.mode() & MODE_MASK);
        if let Err(error) = owned.and_then(|()| self.file.set_permissions(permissions)) {
            tracing::info!(path = %self.target.display(), %error, "the new file cannot be as the one before");
        }
    }

    /// Takes the place of the file under the name, if there is one, in one step.
    ///
    /// # Errors
    /// Those of the file system; the file that was there is as it was.
    pub fn publish(mut self) -> io::Result<()> {
        if self.temporary.is_none() {
            let own = CString::new(own_path(&self.file))?;
            let link = |name: &Path| {
                let name = CString::new(name.as_os_str().as_bytes())?;
                // SAFETY: both are strings that end in zero.
                let code = unsafe {
                    libc::linkat(libc::AT_FDCWD, own.as_ptr(), libc::AT_FDCWD, name.as_ptr(), libc::AT_SYMLINK_FOLLOW)
                };
                if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
            };
            let (temporary, ()) = at_temporary_name(&self.target, link)?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.target)?;
        }
        self.temporary = None;
        Ok(())
    }

    /// The directory of the file, so that it can be flushed too.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open_directory(&self) -> io::Result<File> {
        File::open(directory_of(&self.target))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = fs::remove_file(temporary)
        {
            tracing::warn!(path = %temporary.display(), %error, "a temporary file is left behind");
        }
    }
}

/// Where a path leads, as far as there are links.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        match fs::symlink_metadata(&target) {
            Ok(found) if found.is_symlink() => target = directory_of(&target).join(fs::read_link(&target)?),
            Ok(_) => return Ok(target),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(target),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A file that has no name and is gone with its last descriptor, if it can get a name later.
fn create_unnamed(directory: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).mode(MODE).custom_flags(libc::O_TMPFILE).open(directory)?;
    // The way to its name leads through /proc, which a container may lack.
    let own = fs::metadata(own_path(&file))?;
    let is_itself = file.metadata().is_ok_and(|facts| (facts.dev(), facts.ino()) == (own.dev(), own.ino()));
    if is_itself { Ok(file) } else { Err(io::Error::from(io::ErrorKind::Unsupported)) }
}

fn own_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Makes something under a name that nothing has yet.
fn at_temporary_name<T>(target: &Path, make: impl Fn(&Path) -> io::Result<T>) -> io::Result<(PathBuf, T)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let suffix = format!(".{}-{number}.fst-tmp", std::process::id());
        let mut name = vec![b'.'];
        let file_name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.as_bytes();
        let room = NAME_BYTES_MAX.saturating_sub(name.len() + suffix.len());
        name.extend(file_name.iter().take(room));
        name.extend(suffix.as_bytes());
        let path = directory_of(target).join(OsString::from_vec(name));
        match make(&path) {
            Ok(made) => return Ok((path, made)),
            // Another machine that shares the directory may have a process of this number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}
