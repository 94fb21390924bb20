//! Sizes and numbers of requests.

use crate::num::to_u64;

/// Number of bytes that the first request asks for. Most headers are shorter, and so are many adapters.
pub const FIRST_BYTES: u64 = 1 << 20;
/// Upper bound for the bytes of the first requests for all objects of a checkpoint, since ranks send them to each other.
const ALL_FIRST_BYTES: u64 = 16 << 20;
/// Number of bytes that the first request asks for at least: those of most headers in checkpoints with many files.
const FIRST_BYTES_MIN: u64 = 64 << 10;

/// Largest gap that is requested along with the bytes on both sides, in bytes: about what arrives on one connection in
/// the time that another request takes.
pub const GAP_BYTES: u64 = 1 << 20;
/// Number of requests at once to a host of which nothing is known.
pub const REQUESTS_START: usize = 16;
/// Largest number of requests at once to one host.
pub const REQUESTS_MAX: usize = 256;

/// Returns the number of bytes that the first request for each of `count` objects asks for.
pub fn first_bytes(count: usize) -> u64 {
    (ALL_FIRST_BYTES / to_u64(count).max(1)).clamp(FIRST_BYTES_MIN, FIRST_BYTES)
}
