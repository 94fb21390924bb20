//! Detects the file system of a file from the magic number of statfs(2), and calls that some file systems refuse.

use rustix::fs::{fstatfs, major, minor};
use rustix::io::Errno;
use std::cmp::Ordering;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Kind of file system, as far as it affects the choice of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// On a local disk.
    Local,
    /// In memory. Holds the name of the file system.
    Memory(&'static str),
    /// Served over a network or by another process. Holds the name of the file system.
    Remote(&'static str),
}

const MEMORY: [(u32, &str); 3] = [(0x0102_1994, "tmpfs"), (0x8584_58F6, "ramfs"), (0x9584_58F6, "hugetlbfs")];

const REMOTE: [(u32, &str); 15] = [
    (0x6969, "nfs"),
    (0x517B, "smb"),
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb2"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00C3_6400, "ceph"),
    (0x0BD0_0BD0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x1983_0326, "beegfs"),
    (0x5346_414F, "afs"),
    (0x6B41_4653, "kafs"),
    (0x7375_7245, "coda"),
    (0x7461_636F, "ocfs2"),
    (0x0116_1970, "gfs2"),
];

impl FileSystem {
    /// Returns the kind of file system that holds `file`. One that does not tell is taken for a network file system.
    pub fn of(file: &File) -> FileSystem {
        let stat = match fstatfs(file) {
            Ok(stat) => stat,
            Err(refusal) => {
                tracing::debug!(%refusal, "cannot determine the file system");
                return FileSystem::Remote("an unknown file system");
            }
        };
        let find = |list: &[(u32, &'static str)]| {
            list.iter().find(|(magic, _)| i64::from(*magic) == stat.f_type).map(|(_, name)| *name)
        };
        match (find(&MEMORY), find(&REMOTE)) {
            (Some(name), _) => FileSystem::Memory(name),
            (None, Some(name)) => FileSystem::Remote(name),
            (None, None) => FileSystem::Local,
        }
    }
}

/// Returns whether a file system or a container lacks a call.
pub fn is_unsupported(error: &io::Error) -> bool {
    const REFUSALS: [Errno; 5] = [Errno::OPNOTSUPP, Errno::NOSYS, Errno::INVAL, Errno::PERM, Errno::NOTTY];
    Errno::from_io_error(error).is_some_and(|number| REFUSALS.contains(&number))
}

/// Sets the length of a file. Where only writes set it, writes the last byte of a file that is shorter.
///
/// # Errors
/// The errors of ftruncate(2) and pwrite(2).
pub fn set_length(file: &File, length: u64) -> io::Result<()> {
    let Err(refusal) = file.set_len(length) else { return Ok(()) };
    match file.metadata()?.len().cmp(&length) {
        Ordering::Less if is_unsupported(&refusal) => file.write_all_at(&[0], length.saturating_sub(1)),
        Ordering::Equal if is_unsupported(&refusal) => Ok(()),
        _ => Err(refusal),
    }
}

/// Returns the name of the file system that holds a file, as mount(8) prints it, or `None` if it is unknown.
pub fn mount_type(file: &File) -> Option<String> {
    let device = file.metadata().ok()?.dev();
    let number = format!("{}:{}", major(device), minor(device));
    name_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, &number)
}

/// Returns the type of the mount with this device number: the field after the separator ` - `, which follows any number
/// of optional fields.
fn name_in(mounts: &str, number: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let matches = line.split(' ').nth(2) == Some(number);
        let (_, after) = line.split_once(" - ").filter(|_| matches)?;
        after.split(' ').next().map(str::to_owned)
    })
}
