//! How much this process has made the kernel fetch from storage, as opposed to
//! what it found in the page cache.

use std::fs;

/// Bytes since the process began; `None` where the kernel does not count them.
pub fn read_bytes() -> Option<u64> {
    let counts = fs::read_to_string("/proc/self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}
