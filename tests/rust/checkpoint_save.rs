//! Saves of checkpoints in several files: at each failing call, the old or the new checkpoint is whole.

use crate::save::kernel;
use fst::checkpoint::Checkpoint;
use fst::error::Kind;
use fst::format::layout::{Layout, Tensor};
use fst::os::retry::Check;
use fst::save::checkpoint::stale::remove_stale;
use fst::save::checkpoint::{CheckpointSave, Content, Target};
use fst::save::file_kernel::{FileKernel, Linux};
use fst::source::files::Files;
use rustix::fs::{FlockOperation, flock};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

thread_local! {
    /// Number of calls that succeed, and the error of all later ones.
    static CALLS_LEFT: Cell<(usize, i32)> = const { Cell::new((usize::MAX, 0)) };
}

/// Kernel whose flushes fail once [`CALLS_LEFT`] are used up. There is one between any two steps, except for removals.
struct Failing;

impl Failing {
    fn take() -> io::Result<()> {
        let (left, error) = CALLS_LEFT.get();
        CALLS_LEFT.set((left.saturating_sub(1), error));
        if left == 0 { Err(io::Error::from_raw_os_error(error)) } else { Ok(()) }
    }
}

impl FileKernel for Failing {
    fn flush(&self, file: &File) -> io::Result<()> {
        Failing::take()?;
        Linux.flush(file)
    }
}

fn failing() -> Box<dyn FileKernel> {
    Box::new(Failing)
}

/// Writes files with one tensor each, whose byte is `value`.
fn write(save: &CheckpointSave, directory: &Path, value: u8) -> Content {
    let files = save.names().files;
    let names: Vec<String> = (0..files.len()).map(|file| format!("t{file}")).collect();
    for (name, file) in names.iter().zip(files) {
        let dtype = fst::dtype::Dtype::U8;
        let layout = Layout::new(&[Tensor::new(name.clone(), dtype, vec![1]).unwrap()], &None).unwrap();
        let path = directory.join(file);
        fs::write(&path, [layout.header(), &[value]].concat()).unwrap();
    }
    let tensors = names.into_iter().map(|name| vec![name]).collect();
    Content { tensors, bytes: 1, metadata: [("b".into(), "é\u{1f600}".into())].into(), parts: Vec::new() }
}

fn begin(directory: &Path, count: usize, is_shared: bool, kernel: fn() -> Box<dyn FileKernel>) -> CheckpointSave {
    let target = Target { path: directory.join("model.safetensors"), count, has_index: count > 1, is_shared };
    CheckpointSave::begin(&target, kernel, &|| Ok(())).unwrap()
}

fn save(directory: &Path, count: usize, value: u8) {
    let save = begin(directory, count, false, kernel);
    let content = write(&save, directory, value);
    save.commit(&content, &|| Ok(())).unwrap();
}

/// Returns the number of tensors and their value, which must be equal.
fn loaded(directory: &Path) -> (usize, u8) {
    let checkpoint = Checkpoint::open(&[directory]).unwrap();
    let read = |(file, begin): (usize, u64)| {
        let mut byte = [0];
        checkpoint.source(file).unwrap().read(begin, &mut byte, &|| Ok(())).unwrap();
        byte[0]
    };
    let values: BTreeSet<u8> = checkpoint.entries().map(|(file, entry)| read((file, entry.begin))).collect();
    assert_eq!(values.len(), 1, "tensors of two saves: {values:?}");
    (checkpoint.count(), *values.first().unwrap())
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Removes stale files of a copy of a directory, in which nothing is locked, as after the end of the process.
fn assert_clean_leaves_one_checkpoint(directory: &Path, case: &str) {
    let copy = TempDir::new().unwrap();
    for name in names(directory) {
        fs::copy(directory.join(&name), copy.path().join(&name)).unwrap();
    }
    remove_stale(copy.path(), None, Duration::ZERO, &|| Ok(())).unwrap();
    assert_eq!(loaded(copy.path()), loaded(directory), "{case}");
    let left = names(copy.path());
    let files = left.iter().filter(|name| !name.ends_with(".json")).count();
    assert_eq!(files, loaded(directory).0, "{case}: {left:?}");
}

/// Fails from the nth call on, for all n, and ends the save like an exception or like a kill.
#[test]
fn failures_leave_the_old_or_the_new_checkpoint() {
    for (old, new, is_shared) in [(2, 2, false), (3, 2, true), (1, 2, false), (2, 1, true), (2, 1, false)] {
        for is_killed in [false, true] {
            let mut outcomes = BTreeSet::new();
            for calls in 0.. {
                let directory = TempDir::new().unwrap();
                let path = directory.path();
                save(path, old, 1);
                let before = names(path);
                CALLS_LEFT.set((usize::MAX, libc::EIO));
                let save_of_new = begin(path, new, is_shared, failing);
                let content = write(&save_of_new, path, 2);
                CALLS_LEFT.set((calls, libc::EIO));
                let result = save_of_new.commit(&content, &|| Ok(()));
                let is_new = loaded(path) == (new, 2);
                let case = format!("{old} to {new} files, {calls} calls, killed: {is_killed}, {result:?}");
                assert!(is_new || loaded(path) == (old, 1), "{case}");
                if let Err(error) = &result
                    && new > 1
                {
                    assert_eq!(error.to_string().contains("complete and in place"), is_new, "{case}");
                }
                if is_killed {
                    std::mem::forget(save_of_new);
                    assert_clean_leaves_one_checkpoint(path, &case);
                } else {
                    drop(save_of_new);
                    assert!(is_new || new == 1 || names(path) == before, "{case}: {:?}", names(path));
                    assert!(is_new || !names(path).iter().any(|name| name.ends_with(".fst-tmp")), "{case}");
                }
                outcomes.insert(is_new);
                save(path, 2, 3);
                assert_eq!(loaded(path), (2, 3), "{case}");
                if result.is_ok() {
                    break;
                }
            }
            assert!(outcomes.contains(&true));
        }
    }
}

/// The error of the last flush has the directory, and not every file system can flush one.
#[test]
fn the_last_flush_of_the_directory() {
    for (error, message) in [(libc::EINVAL, None), (libc::EIO, Some("a power failure may still undo its renames"))] {
        let directory = TempDir::new().unwrap();
        let new = begin(directory.path(), 2, false, failing);
        let content = write(&new, directory.path(), 2);
        // For each index the file and the directory, and for each shard the directory.
        CALLS_LEFT.set((2 + 2 + 2, error));
        let result = new.commit(&content, &|| Ok(())).map_err(|error| error.to_string());
        CALLS_LEFT.set((usize::MAX, 0));
        let shown = format!("{}: the new checkpoint is complete", directory.path().display());
        assert_eq!(result.is_err(), message.is_some());
        assert!(result.err().is_none_or(|error| error.contains(message.unwrap()) && error.contains(&shown)));
        assert_eq!((loaded(directory.path()), names(directory.path()).len()), ((2, 2), 3));
    }
}

#[test]
fn files_of_ranks_have_their_length_and_the_old_permissions() {
    let directory = TempDir::new().unwrap();
    save(directory.path(), 1, 1);
    let old = directory.path().join("model.safetensors");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o640)).unwrap();
    let new = begin(directory.path(), 2, true, kernel);
    assert_eq!(new.create(&[5000, 0], &|| Ok(())).unwrap(), ["", ""]);
    let found: Vec<_> =
        new.names().files.iter().map(|name| fs::metadata(directory.path().join(name)).unwrap()).collect();
    let found: Vec<_> = found.iter().map(|found| (found.len(), found.permissions().mode() & 0o777)).collect();
    assert_eq!(found, [(5000, 0o640), (0, 0o640)]);
    assert!(new.create(&[1], &|| Ok(())).unwrap_err().to_string().contains("File exists"));
    drop(new);
    assert_eq!((names(directory.path()), loaded(directory.path())), (vec!["model.safetensors".into()], (1, 1)));
}

/// Readers compare the index once all files are open, and open them again.
#[test]
fn readers_get_the_files_of_one_save() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let check: Check<'_> = &|| Ok(());
    for (old, new) in [(3, 3), (3, 1), (1, 3)] {
        save(path, old, 1);
        fs::write(path.join("other.safetensors"), fs::read(path.join(&names(path)[0])).unwrap()).unwrap();
        let versions = Files::resolve(&[path], check).unwrap().versions;
        assert!(versions.iter().all(|version| version.is_current(true, check)));
        fs::remove_file(path.join("other.safetensors")).unwrap();
        save(path, new, 2);
        // A single file that is open belongs to one save.
        assert!(!versions.iter().any(|version| version.is_current(old > 1, check)));
    }
    thread::scope(|scope| {
        let saves = scope.spawn(|| (0..100).for_each(|value| save(path, 8 - usize::from(value % 3), value)));
        while !saves.is_finished() {
            loaded(path);
        }
    });
    // Without a save, a missing file is an error at once.
    fs::remove_file(path.join("model-00002-of-00008.safetensors")).unwrap();
    let error = Checkpoint::open(&[path]).unwrap_err();
    assert_eq!(error.kind(), Kind::FileNotFound, "{error}");
}

/// Kernel of a file system without hard links.
struct WithoutLinks;

impl FileKernel for WithoutLinks {
    fn link(&self, _: &Path, _: BorrowedFd<'_>, _: &OsStr) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

/// There, the index never names a file that is missing, and no name is used again.
#[test]
fn file_systems_without_hard_links() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let mut known = BTreeSet::new();
    for value in 1..4 {
        let new = begin(path, 2, value == 2, || Box::new(WithoutLinks));
        let content = write(&new, path, value);
        drop(begin(path, 2, false, || Box::new(WithoutLinks)));
        assert!(value == 1 || loaded(path) == (2, value - 1));
        assert!(new.names().files.into_iter().all(|name| known.insert(name)));
        new.commit(&content, &|| Ok(())).unwrap();
        assert_eq!((loaded(path), names(path).len()), ((2, value), 3));
    }
    save(path, 1, 9);
    assert_eq!((loaded(path), names(path).len()), ((1, 9), 1));
}

/// Files of killed saves, of running ones and of users.
#[test]
fn stale_files_are_those_that_no_lock_and_no_index_has() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    save(path, 2, 1);
    let kept = names(path);
    let running = begin(path, 2, false, kernel);
    write(&running, path, 2);
    let locked = File::create(path.join(".b.safetensors.1-0.fst-tmp")).unwrap();
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    let users = ["model-00001-of-00002.safetensors.20261126", ".c.fst-tmp", "x.state-0123abcd", "model.state-0123abc"];
    let of_running = names(path);
    let stale = [
        ".a.safetensors.1-0.fst-tmp",
        ".model.safetensors.00000000.fst-tmp",
        "model-00001-of-00002.safetensors.00000000",
        "model-0123abcd-00001-of-00002.safetensors.0123abcd",
        "model.state-0123abcd",
        "model-00001-of-00009.safetensors.0123abcd",
        ".x-00001-of-00002.safetensors.0123abcd.1-0.fst-tmp",
    ];
    users.iter().chain(&stale).for_each(|name| fs::write(path.join(name), b"1234").unwrap());
    let clean = |age| {
        let removed = remove_stale(path, None, age, &|| Ok(())).unwrap();
        removed.iter().map(|file| file.path.rsplit('/').next().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let removed = clean(Duration::from_secs(60));
    assert_eq!(removed, stale[1..].iter().map(ToString::to_string).collect());
    assert_eq!(clean(Duration::ZERO), [stale[0].to_owned()].into());
    let left: BTreeSet<_> = names(path).into_iter().collect();
    assert_eq!(left, of_running.into_iter().chain(users.map(str::to_owned)).collect());
    drop(running);
    assert_eq!(names(path).len(), kept.len() + users.len() + 1);
    // What an index that cannot be read names is unknown.
    fs::write(path.join("model.safetensors.index.json"), b"{").unwrap();
    fs::write(path.join(stale[4]), b"1234").unwrap();
    assert_eq!(clean(Duration::ZERO), BTreeSet::new());
}
