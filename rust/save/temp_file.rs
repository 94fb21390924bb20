//! Temporary file that replaces the file at its target path atomically.
//!
//! If the file system supports `O_TMPFILE`, the temporary file has no name, and a killed process leaves no file behind.
//! Publishing links it to a temporary name and renames that, since only a rename can replace a file. On other file
//! systems the file has a temporary name from the start: `.<name>.<process>-<number>.fst-tmp`, in the same directory.

use super::file_kernel::FileKernel;
use super::permissions::Permissions;
use crate::error::{Error, Kind, Result};
use crate::os::file_lock::FileLock;
use crate::os::local_file::check_regular;
use crate::source::files::{check_local, intended, local_path};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, linkat, openat, statat, unlinkat};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;
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

/// Path of a file that a save creates or replaces.
pub struct Target {
    /// The caller's path with symbolic links resolved.
    pub path: PathBuf,
    /// Directory of the file. It stays the same if the process changes its working directory.
    directory: Arc<OwnedFd>,
    /// Name of the file in the directory.
    name: OsString,
    /// Permissions of the file at the path, if it exists.
    existing: Option<Permissions>,
}

impl Target {
    /// Checks that the path is free, or that a regular file is there which the process may write.
    ///
    /// # Errors
    /// The errors of opening `path` for writing: `permission-denied`, `is-a-directory`, `file-not-found` for the directory;
    /// `invalid-argument` if `path` exists and is not a regular file, or cannot be the path of a file.
    pub fn open(path: &Path) -> Result<Target> {
        let path = &*check_local(path)?;
        if path.file_name().is_none() || (path.as_os_str().as_bytes().ends_with(b"/") && !path.is_dir()) {
            return Err(Error::new(Kind::InvalidArgument, "has no file name; give the path of a file").at(path));
        }
        let failed = |error: io::Error| cannot_create(error, path);
        // Of the path, since the links of /proc to open pipes cannot be resolved.
        let is_present = match fs::metadata(path) {
            Ok(found) => check_regular(path, &found).map(|()| true)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed(error)),
        };
        let target = resolve_links(path).map_err(failed)?;
        let opened = || {
            let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_os_string();
            let directory = open_directory(CWD, directory_of(&target), OFlags::PATH)?;
            let existing = if is_present {
                check_writable(&directory, &name)?;
                Some(Permissions::read(&target)?)
            } else {
                None
            };
            Ok((name, directory, existing))
        };
        let (name, directory, existing) = opened().map_err(failed)?;
        Ok(Target { path: target, directory: Arc::new(directory), name, existing })
    }

    /// Gives the file `source` this path, too, atomically replacing an existing file. On file systems without hard links,
    /// renames `source`.
    ///
    /// # Errors
    /// The errors of the file system. An existing file is unchanged then.
    pub fn link(&self, source: &Path, kernel: &dyn FileKernel) -> io::Result<()> {
        match self.at_temporary_name(|name| kernel.link(source, self.directory.as_fd(), name)) {
            Ok((temporary, ())) => temporary.rename_to(&self.name, kernel),
            Err(refusal) => {
                tracing::debug!(path = %self.path.display(), %refusal, "cannot create a hard link; renaming the file");
                kernel.rename(CWD, source.as_os_str(), self.directory.as_fd(), &self.name)
            }
        }
    }

    /// Opens the directory of the path, so that the caller can flush it.
    pub fn open_directory(&self) -> io::Result<File> {
        open_directory(&*self.directory, Path::new("."), OFlags::RDONLY).map(File::from)
    }

    /// Calls `make` with unused temporary names in the directory until one succeeds.
    fn at_temporary_name<T>(&self, make: impl Fn(&OsStr) -> io::Result<T>) -> io::Result<(TemporaryName, T)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = self.temporary_name(process::id(), number);
            match make(&name) {
                Ok(made) => return Ok((TemporaryName::new(&self.directory, name), made)),
                // A process on another machine that shares the directory may have the same id.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn temporary_name(&self, process: u32, number: u64) -> OsString {
        let suffix = format!(".{process}-{number}.fst-tmp");
        let mut name = vec![b'.'];
        let room = NAME_BYTES_MAX.saturating_sub(name.len() + suffix.len());
        name.extend(self.name.as_bytes().iter().take(room));
        name.extend(suffix.as_bytes());
        OsString::from_vec(name)
    }

    /// Links a file without a name to a temporary name. All processes that have locked their file try the same name first, so
    /// that a save removes the link of a process that was killed before it renamed the link.
    fn link_unnamed(&self, file: &File, is_locked: bool) -> io::Result<TemporaryName> {
        let link = |name: &OsStr| Ok(linkat(CWD, &*proc_path(file), &*self.directory, name, AtFlags::SYMLINK_FOLLOW)?);
        let shared = self.temporary_name(0, 0);
        let link_shared = || link(&shared).or_else(|_| self.remove_unlocked(&shared).and_then(|()| link(&shared)));
        match is_locked.then(link_shared) {
            Some(Ok(())) => Ok(TemporaryName::new(&self.directory, shared)),
            _ => self.at_temporary_name(link).map(|(name, ())| name),
        }
    }

    /// Removes a link that no process has locked.
    fn remove_unlocked(&self, name: &OsStr) -> io::Result<()> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = Arc::new(File::from(openat(&*self.directory, name, flags, Mode::empty())?));
        let _lock = FileLock::try_exclusive(&file)?;
        // Only the process that has the lock removes the name, so it cannot become another file's name from here on.
        let (own, named) = (file.metadata()?, statat(&*self.directory, name, AtFlags::SYMLINK_NOFOLLOW)?);
        if (own.dev(), own.ino()) == (named.st_dev, named.st_ino) {
            unlinkat(&*self.directory, name, AtFlags::empty())?;
        }
        Ok(())
    }
}

/// Temporary name of a file. Dropping it removes the file, unless it was renamed, or the process is a forked child.
struct TemporaryName {
    directory: Arc<OwnedFd>,
    /// `None` once renamed.
    name: Option<OsString>,
    process: u32,
}

impl TemporaryName {
    fn new(directory: &Arc<OwnedFd>, name: OsString) -> TemporaryName {
        TemporaryName { directory: Arc::clone(directory), name: Some(name), process: process::id() }
    }

    /// Renames the file in its directory, atomically replacing an existing file.
    fn rename_to(mut self, name: &OsStr, kernel: &dyn FileKernel) -> io::Result<()> {
        let Some(own) = self.name.take() else { return Ok(()) };
        let Err(refusal) = kernel.rename(self.directory.as_fd(), &own, self.directory.as_fd(), name) else {
            return Ok(());
        };
        Err(match unlinkat(&*self.directory, &*own, AtFlags::empty()) {
            Ok(()) => refusal,
            Err(error) => {
                let message =
                    format!("{refusal}; the file {} remains, since it cannot be removed: {error}", own.display());
                io::Error::new(refusal.kind(), message)
            }
        })
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        if let Some(name) = self.name.as_ref().filter(|_| self.process == process::id())
            && let Err(error) = unlinkat(&*self.directory, name, AtFlags::empty())
        {
            tracing::warn!(name = %name.display(), %error, "cannot remove a temporary file");
        }
    }
}

/// Temporary file that is being written. Dropping it leaves no file behind.
pub struct TempFile {
    /// Tells programs that remove files of killed processes that this one is in use. Not every file system has locks.
    lock: io::Result<FileLock>,
    /// The open file, readable and writable.
    pub file: Arc<File>,
    /// Path of the file once published.
    target: Target,
    /// `None` while the file has no name. Dropped after `file`, because some file systems refuse to remove an open file.
    temporary: Option<TemporaryName>,
}

impl TempFile {
    /// Creates an empty temporary file for `path`, with the owner, permissions and attributes of the file that it replaces.
    /// If there is none, the permissions of `model` apply, if that is given and exists.
    ///
    /// # Errors
    /// The errors of [`Target::open`], and of creating a file in the directory of `path`.
    pub fn create(path: &Path, model: Option<&Path>) -> Result<TempFile> {
        let target = Target::open(path)?;
        let permissions = target
            .existing
            .clone()
            .or_else(|| model.and_then(|model| Permissions::read(&local_path(model).ok()?).ok()));
        let mode = Mode::from_raw_mode(if permissions.is_some() { PRIVATE_MODE } else { MODE });
        let (file, temporary) = match create_unnamed(&target.directory, mode) {
            Ok(file) => (file, None),
            Err(refusal) => {
                tracing::debug!(path = %path.display(), %refusal, "cannot create a file without a name; using a temporary name");
                let made = target.at_temporary_name(|name| create_at(&*target.directory, Path::new(name), mode));
                let (temporary, file) = made.map_err(|error| cannot_create(error, path))?;
                (file, Some(temporary))
            }
        };
        let file = Arc::new(file);
        let lock = FileLock::try_exclusive(&file);
        tracing::trace!(path = %path.display(), ?lock, "created a temporary file");
        if let Some(permissions) = permissions {
            permissions.apply(&file, &target.path);
        }
        Ok(TempFile { lock, file, target, temporary })
    }

    /// Renames the file to its target path, atomically replacing an existing file.
    ///
    /// # Errors
    /// The errors of the file system. An existing file is unchanged then, and the temporary file is removed.
    pub fn publish(self, kernel: &dyn FileKernel) -> io::Result<()> {
        let TempFile { lock, file, target, temporary } = self;
        let Some(temporary) = temporary else {
            // The lock lasts until the file has its name.
            return target.link_unnamed(&file, lock.is_ok())?.rename_to(&target.name, kernel);
        };
        // Some file systems refuse to rename an open file.
        drop(lock);
        drop(file);
        temporary.rename_to(&target.name, kernel)
    }

    /// Opens the directory of the target, so that the caller can flush it.
    pub fn open_directory(&self) -> io::Result<File> {
        self.target.open_directory()
    }
}

/// Creates an empty file at `path`, where no file is, with the owner and permissions of `model`, if that is given and
/// exists.
pub fn create_new(path: &Path, model: Option<&Path>) -> Result<File> {
    let path = &*check_local(path)?;
    let permissions = model.and_then(|model| Permissions::read(&local_path(model).ok()?).ok());
    let mode = Mode::from_raw_mode(if permissions.is_some() { PRIVATE_MODE } else { MODE });
    let file = create_at(CWD, path, mode).map_err(|error| cannot_create(error, path))?;
    if let Some(permissions) = permissions {
        permissions.apply(&file, path);
    }
    Ok(file)
}

/// Checks that the process may write a file. A rename needs no such permission, but a save should.
fn check_writable(directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
    if accessat(directory, name, Access::WRITE_OK, AtFlags::EACCESS).is_ok() {
        return Ok(());
    }
    // A container may refuse the call.
    match openat(directory, name, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
        // The kernel checks permissions before it looks at leases, such as leases of loads.
        Ok(_) | Err(Errno::WOULDBLOCK) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn cannot_create(error: io::Error, path: &Path) -> Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    let error = Error::from_io(error, path, "cannot create");
    if is_missing { error.note(intended(path).as_deref().unwrap_or("create its directory first")) } else { error }
}

/// Removes a file after an error. Returns the error, which says so if the file remains.
pub fn remove(path: &Path, error: Error) -> Error {
    match fs::remove_file(path) {
        Ok(()) => error,
        Err(refusal) => error.note(&format!("the incomplete file remains, since it cannot be removed: {refusal}")),
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

fn open_directory(parent: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| openat(&parent, path, flags, Mode::empty()))?)
}

/// Creates a file, or fails if one exists.
fn create_at(directory: impl AsFd, path: &Path, mode: Mode) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(File::from(retry_on_intr(|| openat(&directory, path, flags, mode))?))
}

/// Creates a file without a name, or fails if the file could not be given a name later.
fn create_unnamed(directory: &OwnedFd, mode: Mode) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = File::from(retry_on_intr(|| openat(directory, ".", flags, mode))?);
    // Linking the file to a name needs /proc, which a container may lack.
    let linked = fs::metadata(proc_path(&file))?;
    let is_itself =
        file.metadata().is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (linked.dev(), linked.ino()));
    if is_itself { Ok(file) } else { Err(io::Error::from(io::ErrorKind::Unsupported)) }
}

fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}
