//! Sizes and numbers of requests, and of the parts in which an object is uploaded.

use crate::num::{to_u64, to_usize};
use std::time::Duration;

/// Smallest part, except for the last one, in bytes: the limit of S3.
pub const PART_BYTES_MIN: usize = 5 << 20;
/// Largest number of parts of an object: the limit of S3, and the smallest of all services.
pub const PARTS_MAX: usize = 10_000;
/// Number of parts of one size, if the length of the object is not known. Five sizes fit an upload, so that parts of 8
/// MiB at its beginning allow an object of 484 GiB.
const PARTS_PER_SIZE: usize = 2_000;
/// Size of parts is a multiple of this, in bytes.
const PART_ALIGNMENT: u64 = 4 << 10;

/// Sizes of the parts of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Size of the first parts, in bytes.
    bytes: usize,
    /// Number of parts after which the size doubles.
    per_size: usize,
}

impl Parts {
    /// Returns the parts of an object of this length. A part has at least `bytes_min` bytes, except for the last one.
    pub fn of_length(length: u64, bytes_min: usize) -> Parts {
        let bytes = length.div_ceil(to_u64(PARTS_MAX)).next_multiple_of(PART_ALIGNMENT);
        Parts { bytes: to_usize(bytes).max(first_part_bytes(bytes_min)), per_size: PARTS_MAX }
    }

    /// Returns the parts of an object of unknown length. The first ones have at least `bytes_min` bytes.
    pub fn growing(bytes_min: usize) -> Parts {
        Parts { bytes: first_part_bytes(bytes_min), per_size: PARTS_PER_SIZE }
    }

    /// Returns parts of this size.
    pub fn of_size(bytes: usize) -> Parts {
        Parts { bytes: bytes.max(1), per_size: PARTS_MAX }
    }

    /// Returns the size of the first parts, in bytes.
    pub fn first_bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the index and the size of the part that has the byte at `offset`, or `None` if no upload is this long.
    pub fn at(&self, offset: u64) -> Option<(usize, usize)> {
        let (mut begin, mut bytes) = (0_u64, self.bytes);
        for first in (0..PARTS_MAX).step_by(self.per_size) {
            let index = usize::try_from((offset - begin) / to_u64(bytes)).ok()?;
            if index < self.per_size {
                return Some((first + index, bytes));
            }
            begin = begin.checked_add(to_u64(bytes).checked_mul(to_u64(self.per_size))?)?;
            bytes = bytes.checked_mul(2)?;
        }
        None
    }
}

fn first_part_bytes(bytes_min: usize) -> usize {
    bytes_min.max(PART_BYTES_MIN).next_multiple_of(to_usize(PART_ALIGNMENT))
}

/// Number of bytes that the first request asks for. Most headers are shorter, and so are many adapters.
pub const FIRST_BYTES: u64 = 1 << 20;
/// Upper bound for the bytes of the first requests for all objects of a checkpoint, since ranks send them to each other.
const ALL_FIRST_BYTES: u64 = 16 << 20;
/// Number of bytes that the first request asks for at least: enough for most headers in checkpoints with many files.
const FIRST_BYTES_MIN: u64 = 64 << 10;

/// Largest gap that is requested along with the bytes on both sides, in bytes: about what arrives on one connection in
/// the time that another request takes.
pub const GAP_BYTES: u64 = 1 << 20;
/// Number of requests at once to a host of which nothing is known.
pub const REQUESTS_START: usize = 16;
/// Number of requests at once to a far host. A load of a few hundred MB ends before a measurement would raise the number.
pub const REQUESTS_START_FAR: usize = 64;
/// Time in which the first answer of a far host begins, with the time for its connection, at least. Twice the round trip
/// between data centers of one place.
pub const FAR: Duration = Duration::from_millis(5);
/// Largest number of requests at once to one host.
pub const REQUESTS_MAX: usize = 256;

/// Returns the number of bytes that the first request for each of `count` objects asks for.
pub fn first_bytes(count: usize) -> u64 {
    (ALL_FIRST_BYTES / to_u64(count).max(1)).clamp(FIRST_BYTES_MIN, FIRST_BYTES)
}
