//! Bytes that the kernel read from storage for this process. Hits in the page cache do not count.

use std::fs;

/// Returns the number of bytes since the start of the process, or `None` if the kernel does not count them.
pub fn read_bytes() -> Option<u64> {
    let counts = fs::read_to_string("/proc/self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}
