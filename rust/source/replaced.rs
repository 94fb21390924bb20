//! Versions of directories and index files, which a save replaces, and names that it gives to files.

use super::directory::{Chosen, choose, names_in};
use crate::os::local_file::open_regular;
use crate::os::retry::Check;
use crate::remote::find::location::Location;
use crate::remote::find::version;
use crate::remote::transfer::object;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Key of the metadata in an index: id of the save.
pub const SAVE_KEY: &str = "fst.save";

/// Number of hexadecimal digits in the token of a save.
const TOKEN_LENGTH: usize = 8;

/// Version of a directory or of an index, from which files were chosen.
#[derive(Clone, Debug)]
pub enum Version {
    /// Directory without an index, and the names of the chosen files.
    Directory(PathBuf, Vec<OsString>),
    /// Path of an index and the open file, which keeps another file from getting its inode.
    File(PathBuf, Arc<File>),
    /// Index in a store.
    Object(Location, version::Version),
}

impl Version {
    /// Returns whether the same files would be chosen now. What cannot be read has changed.
    pub fn is_current(&self, is_open: bool, check: Check<'_>) -> bool {
        match self {
            // One file belongs to one save.
            Version::Directory(_, names) if is_open && names.len() == 1 => true,
            Version::Directory(directory, names) => {
                let found = names_in(directory).and_then(choose);
                matches!(found, Ok(Chosen::Files(found)) if found == *names)
            }
            Version::File(path, file) => {
                let identity = |file: &File| {
                    let found = file.metadata().ok()?;
                    Some((found.dev(), found.ino(), found.len(), found.ctime(), found.ctime_nsec()))
                };
                // An open file has the newest attributes, also on NFS.
                open_regular(path).is_ok_and(|(found, _)| identity(&found) == identity(file))
            }
            Version::Object(location, _) if location.is_at_revision() => true,
            Version::Object(location, version) => {
                object::open(location, 1, check).is_ok_and(|found| found.version().matches(version))
            }
        }
    }
}

/// Returns whether a text is the token of a save, in names of its files.
pub fn is_token(text: &str) -> bool {
    text.len() == TOKEN_LENGTH && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}
