//! Files that saves replace: permissions, leases of readers, locks in forked children, and the working directory.

use crate::files::{self, address_of, fails_after};
use crate::save::kernel;
use fst::device::host::Host;
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::layout::Tensor;
use fst::options::Options;
use fst::os::file_lock::FileLock;
use fst::os::lease::LeasedFile;
use fst::save::atomic_file::{self, OutputFile};
use fst::save::direct_file::DirectFile;
use fst::save::file_kernel::FileKernel;
use fst::save::writer::Writer;
use rustix::fs::{XattrFlags, fremovexattr, lgetxattr, setxattr};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

/// Access control list: the owner may read and write, the user 1001 gets `user`, the group `group`, and others `other`.
fn acl(user: u16, group: u16, mask: u16, other: u16) -> Vec<u8> {
    let mut list = 2_u32.to_le_bytes().to_vec();
    let entries = [
        (0x01_u16, 6, u32::MAX),
        (0x02, user, 1001),
        (0x04, group, u32::MAX),
        (0x10, mask, u32::MAX),
        (0x20, other, u32::MAX),
    ];
    for (tag, permissions, id) in entries {
        list.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()).chain(id.to_le_bytes()));
    }
    list
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 1000];
    let length = lgetxattr(path, name, &mut *value).ok()?;
    value.truncate(length);
    Some(value)
}

/// Owner, group, mode and access control list of a file.
type Permissions = (u32, u32, u32, Option<Vec<u8>>);

fn permissions_of(path: &Path) -> Permissions {
    let found = fs::metadata(path).unwrap();
    (found.uid(), found.gid(), found.mode() & 0o7777, attribute(path, ACCESS))
}

fn set_permissions(path: &Path, (uid, gid, mode, acl): &Permissions) {
    chown(path, Some(*uid), Some(*gid)).unwrap();
    if let Some(acl) = acl {
        setxattr(path, ACCESS, acl, XattrFlags::empty()).unwrap();
    }
    fs::set_permissions(path, fs::Permissions::from_mode(*mode)).unwrap();
}

/// Runs a function in a thread that accesses files as another user, who is a member of these groups.
fn as_user<T: Send>(uid: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let run = || {
        // SAFETY: the calls change the credentials of this thread only, and read the list of groups.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()), 0);
            libc::syscall(libc::SYS_setfsgid, uid);
            libc::syscall(libc::SYS_setfsuid, uid);
        }
        run()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

fn is_root() -> bool {
    // SAFETY: the call has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

#[test]
fn a_replaced_file_keeps_its_permissions_or_nobody_gains_access() {
    if !is_root() {
        return;
    }
    let list = acl(4, 0, 4, 0);
    // The user who saves, with further groups, the old file, and the new file.
    let cases: [(u32, &[u32], Permissions, Permissions); 10] = [
        (0, &[], (1001, 1002, 0o640, None), (1001, 1002, 0o640, None)),
        (0, &[], (1001, 1002, 0o640, Some(list.clone())), (1001, 1002, 0o640, Some(list.clone()))),
        // A member of the group replaces the file of a colleague.
        (1004, &[1003], (1001, 1003, 0o664, None), (1004, 1003, 0o664, None)),
        (1004, &[1003], (1001, 1003, 0o4775, None), (1004, 1003, 0o775, None)),
        (1004, &[1003], (1004, 1003, 0o660, Some(acl(6, 0, 6, 0))), (1004, 1003, 0o660, Some(acl(6, 0, 6, 0)))),
        // Members of other groups were others before.
        (1004, &[], (1001, 1003, 0o666, None), (1004, 1004, 0o666, None)),
        (1004, &[], (1001, 1003, 0o646, None), (1004, 1004, 0o644, None)),
        (1004, &[], (1004, 1003, 0o664, None), (1004, 1004, 0o644, None)),
        (1004, &[], (1004, 1003, 0o640, Some(list)), (1004, 1004, 0o600, None)),
        // The user 1001 may not read the file, neither before nor after.
        (1004, &[], (1004, 1003, 0o644, Some(acl(0, 4, 4, 4))), (1004, 1004, 0o600, None)),
    ];
    for (uid, groups, old, expected) in cases {
        for has_default in [false, true] {
            let directory = TempDir::new().unwrap();
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
            let at = |name: &str| directory.path().join(name);
            fs::write(at("x"), "old").unwrap();
            set_permissions(&at("x"), &old);
            setxattr(at("x"), "user.note", b"kept", XattrFlags::empty()).unwrap();
            if has_default {
                setxattr(directory.path(), DEFAULT, &acl(7, 7, 7, 7), XattrFlags::empty()).unwrap();
            }
            as_user(uid, groups, || {
                let create = |path: &Path| OutputFile::create_like(path, Some(&at("x")), kernel()).unwrap();
                for name in ["x", "new"] {
                    create(&at(name)).publish(0, &|| Ok(())).unwrap();
                }
                atomic_file::create_sized(&at("sized"), 5, Some(&at("new")), &|| Ok(())).unwrap();
            });
            for name in ["x", "new", "sized"] {
                assert_eq!(permissions_of(&at(name)), expected, "{name} of {old:?} by {uid}, {has_default}");
                assert_eq!(attribute(&at(name), "user.note").unwrap(), b"kept");
            }
        }
    }
}

#[test]
fn a_new_file_has_the_permissions_of_the_directory_and_the_umask() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    for has_default in [false, true] {
        if has_default {
            setxattr(directory.path(), DEFAULT, &acl(6, 4, 6, 0), XattrFlags::empty()).unwrap();
        }
        let (own, saved) = (at(&format!("own {has_default}")), at(&format!("saved {has_default}")));
        File::create(&own).unwrap();
        OutputFile::create(&saved, kernel()).unwrap().publish(0, &|| Ok(())).unwrap();
        assert_eq!(permissions_of(&saved), permissions_of(&own));
    }
    // An access control list has no part in a file whose model has none.
    let file = File::open(at("own true")).unwrap();
    let _ = fremovexattr(&file, ACCESS);
    OutputFile::create_like(&at("like"), Some(&at("own true")), kernel()).unwrap().publish(0, &|| Ok(())).unwrap();
    assert_eq!(permissions_of(&at("like")), permissions_of(&at("own true")));
}

#[test]
fn a_file_without_write_permission_is_not_replaced() {
    if !is_root() {
        return;
    }
    let directory = TempDir::new().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let path = directory.path().join("x");
    fs::write(&path, "old").unwrap();
    set_permissions(&path, &(1001, 1003, 0o464, None));
    for (uid, groups, is_allowed) in [(1001, &[][..], false), (1004, &[], false), (1004, &[1003], true), (0, &[], true)]
    {
        let checked = as_user(uid, groups, || atomic_file::check_target(&path));
        let kind = checked.err().map(|error| error.kind());
        assert_eq!(kind, (!is_allowed).then_some(Kind::PermissionDenied), "{uid} {groups:?}");
    }
}

#[test]
fn a_lease_of_a_reader_does_not_fail_a_save() {
    let (_directory, path) = files::new_path("x");
    fs::write(&path, "old").unwrap();
    let leased = LeasedFile::open(&files::local_file(&path)).unwrap();
    let lease = leased.lease().unwrap();
    atomic_file::check_target(&path).unwrap();
    drop(OutputFile::create(&path, kernel()).unwrap());
    // The lease is still in force: nothing has opened the file for writing.
    drop(leased.lease().unwrap());
    let waiting = DirectFile::open(&path, kernel(), &fails_after(3));
    assert_eq!(waiting.err().unwrap().kind(), Kind::Interrupted);
    thread::scope(|scope| {
        let opened = scope.spawn(|| DirectFile::open(&path, kernel(), &|| Ok(())).map(drop));
        thread::sleep(Duration::from_millis(50));
        assert!(!opened.is_finished());
        drop(lease);
        opened.join().unwrap().unwrap();
    });
}

#[test]
fn a_forked_child_keeps_no_lock_and_removes_no_file() {
    let (directory, path) = files::new_path("x");
    let output = OutputFile::create(&path, kernel()).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let child_output = OutputFile::create(&path, kernel()).unwrap();
    // SAFETY: the child drops a value that no other thread uses, and waits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(child_output);
        // SAFETY: the byte is valid; the process ends with its parent's signal.
        unsafe {
            libc::write(pipe[1], [1_u8].as_ptr().cast(), 1);
            libc::pause();
            libc::_exit(0)
        }
    }
    let mut byte = [0_u8];
    // SAFETY: the byte is valid for writes.
    assert_eq!(unsafe { libc::read(pipe[0], byte.as_mut_ptr().cast(), 1) }, 1);
    for output in [child_output, output] {
        output.publish(0, &|| Ok(())).unwrap();
        drop(FileLock::try_exclusive(&Arc::new(File::open(&path).unwrap())).unwrap());
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    // SAFETY: the child and the descriptors belong to this test.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        libc::close(pipe[0]);
        libc::close(pipe[1]);
    }
}

#[test]
fn a_relative_path_is_that_of_the_directory_at_the_beginning() {
    let (first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let go_to = |directory: &TempDir| std::env::set_current_dir(directory.path()).unwrap();
    let write = || {
        // SAFETY: gives this thread and those that it starts a working directory of their own.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_FS) }, 0);
        go_to(&first);
        fs::write("link target", "old").unwrap();
        std::os::unix::fs::symlink("link target", "link").unwrap();
        let output = |name: &str| OutputFile::create(Path::new(name), kernel()).unwrap();
        let (file, link) = (output("file"), output("link"));
        let mut writer = Writer::begin(output("written"), None, None, &Options::default()).unwrap();
        go_to(&second);
        let bytes = files::pattern(1, 100);
        writer.add(Tensor::new("a", Dtype::U8, vec![100]).unwrap()).unwrap();
        // SAFETY: the bytes outlive the call and do not change.
        unsafe { writer.append(&Host, 0, address_of(&bytes), 100) }.unwrap();
        writer.finish().unwrap();
        file.publish(0, &|| Ok(())).unwrap();
        link.publish(0, &|| Ok(())).unwrap();
    };
    thread::scope(|scope| scope.spawn(write).join().unwrap());
    assert_eq!(fs::read_dir(second.path()).unwrap().count(), 0);
    assert_eq!(fs::read_dir(first.path()).unwrap().count(), 4);
    assert!(first.path().join("link").is_symlink());
    assert_eq!(fs::read(first.path().join("link target")).unwrap(), b"");
}

#[test]
fn a_save_removes_what_a_killed_save_left() {
    let (directory, path) = files::new_path("x");
    let left = directory.path().join(".x.0-0.fst-tmp");
    for is_in_use in [true, false] {
        let file = Arc::new(File::create(&left).unwrap());
        let lock = is_in_use.then(|| FileLock::try_exclusive(&file).unwrap());
        OutputFile::create(&path, kernel()).unwrap().publish(0, &|| Ok(())).unwrap();
        drop(lock);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), if is_in_use { 2 } else { 1 });
    }
}

/// Kernel of a file system that refuses renames.
struct WithoutRenames;

impl FileKernel for WithoutRenames {
    fn rename(&self, _: BorrowedFd<'_>, _: &OsStr, _: BorrowedFd<'_>, _: &OsStr) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EACCES))
    }
}

#[test]
fn a_refused_rename_leaves_only_the_old_file() {
    let (directory, path) = files::new_path("x");
    fs::write(&path, "old").unwrap();
    let error = OutputFile::create(&path, Box::new(WithoutRenames)).unwrap().publish(0, &|| Ok(())).unwrap_err();
    assert_eq!(error.kind(), Kind::PermissionDenied);
    for part in ["/x: ", "cannot give the complete new file its name", "os error 13"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}
