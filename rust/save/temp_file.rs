//! Temporary file that replaces the file at its target path atomically.
//!
//! If the file system supports `O_TMPFILE`, the temporary file has no name, and a killed process leaves no file behind.
//! Publishing links it to a temporary name and renames that, since only a rename can replace a file. On other file
//! systems the file has the temporary name from the start: `.<name>.<process>-<number>.fst-tmp`, in the same directory.

use super::file_kernel::FileKernel;
use crate::error::{Error, Kind, Result};
use crate::os::local_file::check_regular;
use crate::source::files::check_local;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, linkat, openat};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of symbolic links to follow, as in Linux.
const LINKS_MAX: usize = 40;
/// Maximum length of a file name on Linux, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// Mode of a new file, before the umask of the process applies.
const MODE: u32 = 0o666;
/// Mode of a file that gets the permissions of another one, until it has them.
const PRIVATE_MODE: u32 = 0o600;
/// Permission bits of a file's mode.
const MODE_MASK: u32 = 0o7777;

/// Path of a file that a save creates or replaces.
pub struct Target {
    /// The caller's path with symbolic links resolved.
    pub path: PathBuf,
    /// Metadata of the file at the path, if it exists.
    existing: Option<Metadata>,
}

impl Target {
    /// Checks that the path is free, or that a regular file is there which the process may write.
    ///
    /// # Errors
    /// The errors of opening `path` for writing: `permission-denied`, `is-a-directory`; `invalid-argument` if `path`
    /// exists and is not a regular file, or cannot be the path of a file.
    pub fn open(path: &Path) -> Result<Target> {
        let path = &*check_local(path)?;
        if path.file_name().is_none() {
            return Err(Error::new(Kind::InvalidArgument, "has no file name; give the path of a file").at(path));
        }
        let failed = |error: io::Error| cannot_create(error, path);
        let target = resolve_links(path).map_err(failed)?;
        match fs::metadata(&target) {
            // Opening a device may have effects. This check avoids them, and the second one cannot be outrun.
            Ok(found) => check_regular(path, &found)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Target { path: target, existing: None });
            }
            Err(error) => return Err(failed(error)),
        }
        // A rename needs no permission to write the replaced file, but a save should need it.
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&target);
        let existing = opened.and_then(|file| file.metadata()).map_err(failed)?;
        check_regular(path, &existing)?;
        Ok(Target { path: target, existing: Some(existing) })
    }

    /// Gives the file `source` this path, too, atomically replacing an existing file. On file systems without hard links,
    /// renames `source`.
    ///
    /// # Errors
    /// Those of the file system. An existing file is unchanged then.
    pub fn link(&self, source: &Path, kernel: &dyn FileKernel) -> io::Result<()> {
        match at_temporary_name(&self.path, |name| kernel.link(source, name)) {
            Ok((temporary, ())) => fs::rename(&temporary, &self.path).inspect_err(|_| remove(&temporary)),
            Err(refusal) => {
                tracing::debug!(path = %self.path.display(), %refusal, "cannot create a hard link; renaming the file");
                fs::rename(source, &self.path)
            }
        }
    }

    /// Opens the directory of the path, so that the caller can flush it.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open_directory(&self) -> io::Result<File> {
        File::open(directory_of(&self.path))
    }
}

/// Temporary file that is being written.
pub struct TempFile {
    /// The open file, readable and writable.
    pub file: Arc<File>,
    /// Path of the file once published.
    target: Target,
    /// Path under its temporary name, or `None` while the file has no name.
    temporary: Option<PathBuf>,
}

impl TempFile {
    /// Creates an empty temporary file for `path`, with the owner and permissions of the file that it replaces. If there
    /// is none, those of `model` apply, if that is given and exists.
    ///
    /// # Errors
    /// Those of [`Target::open`], and those of creating a file in the directory of `path`.
    pub fn create(path: &Path, model: Option<&Path>) -> Result<TempFile> {
        let failed = |error: io::Error| cannot_create(error, path);
        let target = Target::open(path)?;
        let permissions = target.existing.clone().or_else(|| model.and_then(|model| fs::metadata(model).ok()));
        let mode = if permissions.is_some() { PRIVATE_MODE } else { MODE };
        let temp_file = match create_unnamed(directory_of(&target.path), mode) {
            Ok(file) => TempFile { file: Arc::new(file), target, temporary: None },
            Err(refusal) => {
                tracing::debug!(path = %path.display(), %refusal, "cannot create a file without a name; using a temporary name");
                let (temporary, file) = at_temporary_name(&target.path, |name| {
                    OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(name)
                })
                .map_err(failed)?;
                TempFile { file: Arc::new(file), target, temporary: Some(temporary) }
            }
        };
        // A program that removes files of killed processes leaves locked ones alone. Not every file system has locks.
        let locked = flock(&temp_file.file, FlockOperation::NonBlockingLockExclusive);
        tracing::trace!(path = %path.display(), ?locked, "created a temporary file");
        if let Some(permissions) = permissions {
            copy_permissions(&temp_file.file, &temp_file.target.path, &permissions);
        }
        Ok(temp_file)
    }

    /// Renames the file to its target path, atomically replacing an existing file.
    ///
    /// # Errors
    /// Those of the file system. An existing file is unchanged then.
    pub fn publish(mut self) -> io::Result<()> {
        if self.temporary.is_none() {
            let proc_path = proc_path(&self.file);
            let link = |name: &Path| Ok(linkat(CWD, &*proc_path, CWD, name, AtFlags::SYMLINK_FOLLOW)?);
            let (temporary, ()) = at_temporary_name(&self.target.path, link)?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.target.path)?;
        }
        self.temporary = None;
        Ok(())
    }

    /// Opens the directory of the target, so that the caller can flush it.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open_directory(&self) -> io::Result<File> {
        self.target.open_directory()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            remove(temporary);
        }
    }
}

/// Creates an empty file at `path`, where no file is, with the owner and permissions of `model`, if that is given and
/// exists.
///
/// # Errors
/// Those of creating a file.
pub fn create_new(path: &Path, model: Option<&Path>) -> Result<File> {
    let path = &*check_local(path)?;
    let permissions = model.and_then(|model| fs::metadata(model).ok());
    let mode = if permissions.is_some() { PRIVATE_MODE } else { MODE };
    let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(path);
    let file = opened.map_err(|error| cannot_create(error, path))?;
    if let Some(permissions) = permissions {
        copy_permissions(&file, path, &permissions);
    }
    Ok(file)
}

/// Gives a new file the owner and the permissions of an existing one. Without the right to change the owner, the file
/// belongs to the user of the process.
fn copy_permissions(file: &File, path: &Path, existing: &Metadata) {
    let set_owner = |(uid, gid)| std::os::unix::fs::fchown(file, uid, gid);
    let differs = file.metadata().is_ok_and(|owner| (owner.uid(), owner.gid()) != (existing.uid(), existing.gid()));
    let owned = if differs { set_owner((Some(existing.uid()), Some(existing.gid()))) } else { Ok(()) };
    let permissions = fs::Permissions::from_mode(existing.mode() & MODE_MASK);
    if let Err(error) = owned.and_then(|()| file.set_permissions(permissions)) {
        tracing::info!(path = %path.display(), %error, "cannot copy the owner and permissions of another file");
    }
}

fn cannot_create(error: io::Error, path: &Path) -> Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    let error = Error::from_io(error, path, "cannot create");
    if is_missing { error.note("create its directory first") } else { error }
}

/// Removes a temporary file.
pub fn remove(temporary: &Path) {
    if let Err(error) = fs::remove_file(temporary) {
        tracing::warn!(path = %temporary.display(), %error, "cannot remove a temporary file");
    }
}

/// Resolves symbolic links of a path whose last component may not exist.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        match fs::symlink_metadata(&target) {
            Ok(found) if found.is_symlink() => target = directory_of(&target).join(fs::read_link(&target)?),
            Ok(_) => return Ok(target),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(target),
            Err(error) => return Err(error),
        }
    }
    Err(Errno::LOOP.into())
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Creates a file without a name, or fails if the file could not be given a name later.
fn create_unnamed(directory: &Path, mode: u32) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = File::from(retry_on_intr(|| openat(CWD, directory, flags, Mode::from_raw_mode(mode)))?);
    // Linking the file to a name needs /proc, which a container may lack.
    let linked = fs::metadata(proc_path(&file))?;
    let is_itself =
        file.metadata().is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (linked.dev(), linked.ino()));
    if is_itself { Ok(file) } else { Err(io::Error::from(io::ErrorKind::Unsupported)) }
}

fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Calls `make` with unused temporary names beside `target` until one succeeds.
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
            // A process on another machine that shares the directory may have the same id.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}
