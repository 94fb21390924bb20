//! What the kernel holds of a file in memory: asked before a read, and given
//! up after one.

use crate::source::Source;
use crate::staging::PAGE_BYTES;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::{io, mem};

/// A part of a file all of which is in memory, or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// From the start of the file.
    pub range: Range<u64>,
    /// Whether a read would be answered from memory.
    pub is_cached: bool,
}

/// The pages of the kernel.
pub const KERNEL_PAGE_BYTES: u64 = 4 << 10;
