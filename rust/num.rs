//! Saturating conversions between `usize`, for bytes in memory, and `u64`, for bytes in files and on devices.
//!
//! On a 64-bit target neither changes a value.

/// Converts a count of bytes in memory.
pub fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Converts a count of bytes in a file or on a device.
pub fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
