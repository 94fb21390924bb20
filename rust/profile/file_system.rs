//! The name of the file system that a file is on, as mount(8) shows it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// `None` where the kernel does not say.
pub fn of(file: &File) -> Option<String> {
    let device = file.metadata().ok()?.dev();
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    name_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, &number)
}

/// The type of the mount with this device number: the field behind the lone dash, of which any number of optional
/// fields may stand before it.
fn name_in(mounts: &str, number: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let is_it = line.split(' ').nth(2) == Some(number);
        let (_, behind) = line.split_once(" - ").filter(|_| is_it)?;
        behind.split(' ').next().map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_with_the_number_names_the_type() {
        let mounts = "22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw\n\
                      30 22 0:27 / /dev/shm rw - tmpfs shm rw\n";
        assert_eq!(name_in(mounts, "8:1").as_deref(), Some("ext4"));
        assert_eq!(name_in(mounts, "0:27").as_deref(), Some("tmpfs"));
        assert_eq!(name_in(mounts, "0:2"), None);
    }
}
