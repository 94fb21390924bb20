//! Save of a checkpoint in several files or objects, with an index that maps tensors to files. Saves of one process and of
//! ranks take the same steps.
//!
//! Readers begin with the index, so a new index replaces the checkpoint in one step. A save never writes to a file that
//! the current index names:
//!
//! 1. The files are written under temporary names, and the index is replaced by one with these names.
//! 2. The files are linked to their final names, and the index is replaced again.
//! 3. The temporary names and the files of the old checkpoint are removed.
//!
//! An object cannot be renamed, and not every file system has hard links. There, the files are written under names that
//! no older checkpoint has, and the index goes last.
//!
//! A process that ends at any step leaves the old or the new checkpoint, whole. The state is here and not in the caller,
//! so that an exception between two calls, such as one of a signal handler, cannot separate the files from what is known
//! of them. After a failure, only temporary names are removed, and only if the index does not name them.

mod index;
mod lock;
mod names;
mod path;
mod remove;
pub mod stale;

pub use self::index::Content;
use self::lock::SaveLock;
use self::names::{NameOfSave, SUFFIX, new_token};
use self::path::CheckpointPath;
use super::atomic_file::{self, OutputFile};
use super::file_kernel::FileKernel;
use super::output::{self, Output};
use super::temp_file;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::source::index::STATE;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::iter::once;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

/// Time in which the objects of a save that failed are removed.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(10);
/// Message of the errors after which the new checkpoint is in place.
const COMPLETE: &str =
    "the new checkpoint is complete and in place; the next save removes the files that are left of the old one";
const NOT_FLUSHED: &str = "the new checkpoint is complete and in place, but a power failure may still undo its renames, \
                           because the directory cannot be flushed";

/// Checkpoint to replace, and the files of the new one.
#[derive(Clone, Debug, Deserialize)]
pub struct Target {
    /// Path or URL of the checkpoint. Its files are beside it.
    pub path: PathBuf,
    /// Number of files.
    pub count: usize,
    /// Whether there is an index. Several files always have one.
    pub has_index: bool,
    /// Whether several processes write to a file, which therefore does not appear whole.
    pub is_shared: bool,
}

/// Names for the caller, who writes the files.
#[derive(Debug, Serialize)]
pub struct Names {
    /// Name under which each file is written.
    pub files: Vec<String>,
    /// Name of the file from which each new file gets its permissions, or nothing.
    pub permissions_from: Vec<Option<String>>,
    /// Name of a file for values that are not tensors.
    pub state: String,
}

/// Save of a checkpoint in progress. Dropping it before it is committed abandons it.
pub struct CheckpointSave {
    path: CheckpointPath,
    has_index: bool,
    had_index: bool,
    /// Whether files are written under temporary names, and linked to their final names.
    is_staged: bool,
    /// Whether an index names the files while they have both names.
    is_staged_in_index: bool,
    /// Whether no file had the names in `written` before.
    has_new_names: bool,
    /// Names of the files of the new checkpoint.
    names: Vec<String>,
    /// Names under which they are written.
    written: Vec<String>,
    /// Names of the files of older checkpoints, without their index.
    old: Vec<String>,
    /// Random part of names. The index has it as the id of the save.
    token: String,
    kernel: fn() -> Box<dyn FileKernel>,
    process: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lock: Option<SaveLock>,
    /// Ids of uploads that have not ended, by the indices of the objects.
    uploads: BTreeMap<usize, String>,
    step: Step,
}

/// Progress of a save.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Step {
    /// The old checkpoint is in place.
    #[default]
    Writing,
    /// The index is being replaced. If that fails, the answer of a store may have been lost.
    Replacing,
    /// The new checkpoint is in place.
    Replaced,
    Ended,
}

impl CheckpointSave {
    /// Chooses names for the files of a checkpoint, and checks that all of them can be created or replaced. Fails with
    /// `invalid-argument` if the path does not end in `.safetensors`.
    pub fn begin(target: &Target, kernel: fn() -> Box<dyn FileKernel>, check: Check<'_>) -> Result<CheckpointSave> {
        let path = CheckpointPath::new(&target.path)?;
        let has_index = target.has_index || target.count > 1;
        let mut save = CheckpointSave {
            has_index,
            had_index: false,
            is_staged: false,
            is_staged_in_index: false,
            has_new_names: false,
            names: vec![path.name.clone()],
            written: Vec::new(),
            old: Vec::new(),
            path,
            token: new_token()?,
            kernel,
            process: process::id(),
            state: Mutex::default(),
        };
        let shards = |stem: &str| -> Vec<String> {
            (1..=target.count).map(|number| format!("{stem}-{number:05}-of-{:05}{SUFFIX}", target.count)).collect()
        };
        if has_index {
            save.names = shards(&save.path.stem);
        }
        let (present, old) = save.path.list(check)?;
        (save.had_index, save.old) = (present.contains(&save.path.index), old);
        if !save.path.is_remote {
            for name in save.old.iter().chain(&save.names).chain(once(&save.path.index)).collect::<BTreeSet<_>>() {
                output::check_target(&save.path.beside(name))?;
            }
        }
        let is_indexed = has_index || save.had_index;
        if !save.path.is_remote && (is_indexed || target.is_shared) {
            save.names.iter().try_for_each(|name| save.check_link(name))?;
            let (lock, token) = SaveLock::create(&save.path.directory(), &save.path.stem, &*kernel())?;
            save.is_staged_in_index = is_indexed && lock.has_links;
            save.is_staged = save.is_staged_in_index || (target.is_shared && !has_index);
            save.has_new_names = save.is_staged || has_index;
            save.state.lock().lock = Some(lock);
            save.token = token;
        }
        if save.is_staged {
            save.written = shards(&save.path.stem).iter().map(|name| format!("{name}.{}", save.token)).collect();
            return Ok(save);
        }
        if has_index && (save.has_new_names || save.had_index || save.names.iter().any(|name| present.contains(name))) {
            // A reader that has the index of an older checkpoint may still open its files.
            save.names = shards(&format!("{}-{}", save.path.stem, save.token));
        }
        save.has_new_names |= has_index;
        save.written = save.names.clone();
        Ok(save)
    }

    /// Returns the names of the files that the caller writes.
    pub fn names(&self) -> Names {
        let permissions_from = self.names.iter().map(|name| self.permissions_from(name).map(str::to_owned)).collect();
        Names { files: self.written.clone(), permissions_from, state: self.state_name() }
    }

    /// Creates the files with these lengths in bytes, or begins uploads, for several processes. Returns the ids of the
    /// uploads, which are empty for files.
    pub fn create(&self, lengths: &[u64], check: Check<'_>) -> Result<Vec<String>> {
        let mut state = self.state.lock();
        let files = self.names.iter().zip(&self.written).zip(lengths).enumerate();
        let create = |(file, ((name, written), &length)): (usize, ((&String, &String), &u64))| {
            let permissions = self.permissions_from(name).map(|from| self.path.beside(from));
            let upload = output::create_shared(&self.path.beside(written), length, permissions.as_deref(), check)?;
            if self.path.is_remote {
                state.uploads.insert(file, upload.clone());
            }
            Ok(upload)
        };
        files.map(create).collect()
    }

    /// Replaces the checkpoint by the complete files, and removes the files of the old one. Once the index is replaced,
    /// Ctrl-C does not end the steps on local files. Fails with the errors of the file system or of the store, with the
    /// old checkpoint in place unless the message says otherwise.
    pub fn commit(&self, content: &Content, check: Check<'_>) -> Result<()> {
        let mut state = self.state.lock();
        if state.step != Step::Writing {
            return Err(Error::new(Kind::InvalidArgument, "the save has ended; begin another").at(&self.path.path));
        }
        let check = if self.path.is_remote { check } else { &|| Ok(()) };
        self.replace(&mut state, content, check).map_err(|error| match self.is_in_place(state.step) {
            true => error.note(COMPLETE),
            false => error,
        })?;
        if let Some(lock) = state.lock.take() {
            lock.release(false);
        }
        state.step = Step::Ended;
        if self.path.is_remote { Ok(()) } else { self.flush_directory() }
    }

    /// Ends a save that has failed. Removes its files, unless they are the checkpoint already. Does nothing after a commit,
    /// and in a forked child.
    pub fn abandon(&self) {
        let mut state = self.state.lock();
        if state.step == Step::Ended || self.process != process::id() {
            return;
        }
        let end = Instant::now() + ABANDON_TIMEOUT;
        let check: Check<'_> = &|| match Instant::now() < end {
            true => Ok(()),
            false => Err(Error::new(Kind::Io, "no answer in time")),
        };
        // What a store has answered may be lost, so nothing is removed once the index was sent.
        let mut leaves_files = self.is_in_place(state.step) || (self.path.is_remote && state.step != Step::Writing);
        if !leaves_files {
            for (file, upload) in std::mem::take(&mut state.uploads) {
                let url = self.written.get(file).map(|name| self.path.beside(name)).unwrap_or_default();
                leaves_files |= log_failure(output::abort_shared(&url, upload));
            }
            for name in self.written.iter().filter(|_| self.has_new_names).chain(once(&self.state_name())) {
                leaves_files |= log_failure(self.path.remove(name, check));
            }
        }
        if let Some(lock) = state.lock.take() {
            lock.release(leaves_files);
        }
        state.step = Step::Ended;
    }

    fn replace(&self, state: &mut State, content: &Content, check: Check<'_>) -> Result<()> {
        while let Some((&file, upload)) = state.uploads.first_key_value() {
            let parts = content.parts.iter().filter(|(object, ..)| *object == file);
            let parts = parts.map(|(_, index, id)| (*index, id.clone())).collect();
            let url = self.written.get(file).map(|name| self.path.beside(name)).unwrap_or_default();
            output::complete_shared(&url, upload.clone(), parts, check)?;
            state.uploads.remove(&file);
        }
        state.step = Step::Replacing;
        if self.is_staged_in_index {
            self.write_index(&self.written, content, check)?;
            state.step = Step::Replaced;
        }
        if self.is_staged {
            for (source, name) in self.written.iter().zip(&self.names) {
                atomic_file::link(&self.path.beside(source), &self.path.beside(name), &*(self.kernel)(), check)?;
            }
        }
        if self.has_index || self.had_index {
            // The index names the new files while the old ones are removed.
            self.write_index(&self.names, content, check)?;
        }
        state.step = Step::Replaced;
        let state_file = content.metadata.get(STATE);
        let is_new = |name: &String| self.names.contains(name) || Some(name) == state_file;
        let staged = self.written.iter().filter(|_| self.is_staged);
        let index = once(&self.path.index).filter(|_| self.had_index && !self.has_index);
        for name in self.old.iter().chain(staged).filter(|name| !is_new(name)).chain(index) {
            self.path.remove(name, check)?;
            // A killed save may have left its lock beside files that the index named.
            let killed = NameOfSave::of_file(name).filter(|save| save.token != self.token && !self.path.is_remote);
            if let Some(save) = killed {
                self.path.remove(&save.lock(), check)?;
            }
        }
        Ok(())
    }

    /// Returns whether the new checkpoint is in place, as far as that can be known.
    fn is_in_place(&self, step: Step) -> bool {
        // The rename of an index may succeed although the call fails.
        step == Step::Replaced
            || (!self.path.is_remote
                && (self.has_index || self.had_index)
                && step == Step::Replacing
                && self.is_named_by_index())
    }

    /// Returns whether the index on the disk is one of this save, or may be.
    fn is_named_by_index(&self) -> bool {
        match fs::read(self.path.beside(&self.path.index)) {
            Ok(content) => String::from_utf8_lossy(&content).contains(&self.token),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    fn write_index(&self, files: &[String], content: &Content, check: Check<'_>) -> Result<()> {
        let path = self.path.beside(&self.path.index);
        let output = if self.path.is_remote {
            Output::open(&path, None)?
        } else {
            let permissions = self.permissions_from(&self.path.index).map(|from| self.path.beside(from));
            OutputFile::create_like(&path, permissions.as_deref(), (self.kernel)())?.into()
        };
        write_file(output, index::text(files, content, &self.token)?.into_bytes(), check)
    }

    /// Returns the name of the file that a new file replaces, or else of one of the old checkpoint.
    fn permissions_from<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        let old = self.old.iter().map(String::as_str);
        let mut candidates =
            once(name).chain(old).chain(once(self.path.index.as_str())).filter(|_| !self.path.is_remote);
        candidates.find(|name| self.path.beside(name).exists())
    }

    fn state_name(&self) -> String {
        format!("{}.state-{}", self.path.stem, self.token)
    }

    /// Checks that a shard, if it is a symbolic link, can be linked to the target's directory once it is complete.
    fn check_link(&self, name: &str) -> Result<()> {
        let path = self.path.beside(name);
        let device =
            |directory: Option<&Path>| directory.and_then(|path| fs::metadata(path).ok()).map(|found| found.dev());
        if path.is_symlink()
            && device(temp_file::Target::open(&path)?.path.parent()) != device(Some(&self.path.directory()))
        {
            let message = "is a symbolic link to another file system; a shard cannot replace it. Remove the link";
            return Err(Error::new(Kind::InvalidArgument, message).at(path));
        }
        Ok(())
    }

    fn flush_directory(&self) -> Result<()> {
        let directory = self.path.directory();
        let opened = File::open(&directory).map_err(|error| Error::from_io(error, &directory, NOT_FLUSHED))?;
        atomic_file::flush_directory(&opened, &directory, NOT_FLUSHED, &*(self.kernel)(), &|| Ok(()))
    }
}

impl Drop for CheckpointSave {
    fn drop(&mut self) {
        self.abandon();
    }
}

/// Writes a whole file or object.
pub fn write_file(mut output: Output, bytes: Vec<u8>, check: Check<'_>) -> Result<()> {
    let length = bytes.len();
    output.prepare_growing(&Options::from_env()?);
    output.write(bytes, length, 0, check)?;
    output.publish(to_u64(length), check)
}

/// Logs an error of cleaning up, after which the caller raises the error of the save. Returns whether there is one.
fn log_failure(result: Result<()>) -> bool {
    let logged = result.inspect_err(|error| tracing::warn!(%error, "cannot remove a file of a save that has failed"));
    logged.is_err()
}
