//! Owner, group, mode, access control list and attributes of a file, which the file that replaces it gets.
//!
//! A process may lack the right to set some of them. The new file then never gives anybody more access than the old one
//! did, apart from the owner, and the log names what was lost.

use rustix::fs::{
    Gid, Uid, XattrFlags, fchown, fremovexattr, fsetxattr, lgetxattr, lgetxattr_query, llistxattr, llistxattr_query,
};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Attribute with the access control list of a file.
const ACL: &str = "system.posix_acl_access";
/// Prefix of the attributes that belong to users.
const USER: &[u8] = b"user.";

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
/// Bits of a mode, without the bits of the type.
const MODE_MASK: u32 = 0o7777;

/// Owner, permissions and attributes of a file.
#[derive(Clone, Debug)]
pub(super) struct Permissions {
    uid: u32,
    gid: u32,
    mode: u32,
    /// Access control list, if it says more than the mode. The group bits of the mode are then its mask.
    acl: Option<Vec<u8>>,
    /// Attributes of users.
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Permissions {
    /// Reads the permissions and attributes of the file at a path.
    pub(super) fn read(path: &Path) -> io::Result<Permissions> {
        let metadata = fs::metadata(path)?;
        Ok(Permissions {
            uid: metadata.uid(),
            gid: metadata.gid(),
            mode: metadata.mode() & MODE_MASK,
            acl: attribute(path, ACL.as_bytes()).ok(),
            attributes: user_attributes(path),
        })
    }

    /// Gives them to a new file, which only its owner can open so far.
    pub(super) fn apply(&self, file: &File, path: &Path) {
        let mut lost: Vec<String> = Vec::new();
        let (keeps_owner, keeps_group) = self.set_owner(file);
        let mut mode = self.mode;
        if !keeps_owner {
            mode &= !SET_USER_ID;
            lost.push(format!("the owner {}", self.uid));
        }
        let set = |acl: &[u8]| fsetxattr(file, ACL, acl, XattrFlags::empty());
        let copied = self.acl.as_ref().map(|acl| keeps_group && set(acl).is_ok());
        if copied != Some(true) {
            // The directory may have given the file another list. A file system without lists refuses this.
            let _ = fremovexattr(file, ACL);
        }
        if let (Some(acl), Some(false)) = (&self.acl, copied) {
            mode = without_acl(acl, mode);
            lost.push("the access control list".to_owned());
        }
        if !keeps_group {
            // Members of the old group count as others now, and members of the new group were others.
            let common = (mode >> 3) & mode & 0o7;
            mode = (mode & 0o7700 & !SET_GROUP_ID) | (common << 3) | common;
            lost.push(format!("the group {}", self.gid));
        }
        if let Err(error) = file.set_permissions(fs::Permissions::from_mode(mode)) {
            lost.push(format!("the mode {mode:o} ({error})"));
        }
        for (name, value) in &self.attributes {
            let name = OsStr::from_bytes(name);
            if let Err(error) = fsetxattr(file, name, value, XattrFlags::empty()) {
                lost.push(format!("the attribute {} ({error})", name.display()));
            }
        }
        if !lost.is_empty() {
            let (lost, mode) = (lost.join(", "), format!("{mode:o}"));
            tracing::warn!(path = %path.display(), lost, mode, "the new file does not keep all permissions of the old one");
        }
    }

    /// Returns whether the file has the owner, and whether it has the group.
    fn set_owner(&self, file: &File) -> (bool, bool) {
        let is_owned = |metadata: fs::Metadata| (metadata.uid() == self.uid, metadata.gid() == self.gid);
        let (has_owner, has_group) = file.metadata().map_or((false, false), is_owned);
        if has_owner && has_group {
            return (true, true);
        }
        let group = Some(Gid::from_raw(self.gid));
        if fchown(file, Some(Uid::from_raw(self.uid)), group).is_ok() {
            return (true, true);
        }
        // A process may give its files to the groups of which it is a member.
        (has_owner, has_group || fchown(file, None, group).is_ok())
    }
}

/// Returns a mode for a file without the access control list that gives nobody more access than with the list.
fn without_acl(acl: &[u8], mode: u32) -> u32 {
    const USER: u16 = 0x02;
    const GROUP_OBJECT: u16 = 0x04;
    const GROUP: u16 = 0x08;
    // An entry has a tag, permissions and an id. A version stands before the entries.
    let entries = || {
        acl.get(4..).unwrap_or_default().chunks_exact(8).filter_map(|entry| match *entry {
            [tag_low, tag_high, low, high, ..] => {
                Some((u16::from_le_bytes([tag_low, tag_high]), u32::from(u16::from_le_bytes([low, high]))))
            }
            _ => None,
        })
    };
    let mask = (mode >> 3) & 0o7;
    let (mut group, mut other) = (mask, mode & 0o7);
    for (tag, permissions) in entries() {
        match tag {
            GROUP_OBJECT => group &= permissions,
            // Named users may be members of the group.
            USER => {
                group &= permissions;
                other &= permissions & mask;
            }
            GROUP => other &= permissions & mask,
            _ => {}
        }
    }
    (mode & 0o7700) | (group << 3) | other
}

fn attribute(path: &Path, name: &[u8]) -> io::Result<Vec<u8>> {
    let mut value = vec![0; lgetxattr_query(path, name)?];
    let length = lgetxattr(path, name, &mut *value)?;
    value.truncate(length);
    Ok(value)
}

fn user_attributes(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let list = || -> io::Result<Vec<u8>> {
        let mut names = vec![0; llistxattr_query(path)?];
        let length = llistxattr(path, &mut *names)?;
        names.truncate(length);
        Ok(names)
    };
    let names = list().unwrap_or_default();
    let own = names.split(|&byte| byte == 0).filter(|name| name.starts_with(USER));
    own.filter_map(|name| match attribute(path, name) {
        Ok(value) => Some((name.to_vec(), value)),
        Err(error) => {
            let name = OsStr::from_bytes(name).display();
            tracing::warn!(path = %path.display(), %name, %error, "cannot read an attribute of the file to replace");
            None
        }
    })
    .collect()
}
