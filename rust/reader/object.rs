//! Reader of remote objects.

use super::{ReadLimits, Reader, SlotBuffer};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::retry::Check;
use crate::plan::Read;
use crate::remote::object::{GAP_BYTES, Object};
use crate::remote::streams::STREAMS_MAX;
use std::sync::Arc;

/// Reader that requests ranges of an object.
pub struct ObjectReader {
    object: Arc<Object>,
    request_bytes: usize,
}

impl ObjectReader {
    /// Creates a reader whose requests have up to `request_bytes` bytes.
    pub fn new(object: Arc<Object>, request_bytes: usize) -> Self {
        ObjectReader { object, request_bytes }
    }
}

impl Reader for ObjectReader {
    fn limits(&self) -> ReadLimits {
        ReadLimits {
            alignment: 1,
            gap_bytes: GAP_BYTES,
            // Smaller tensors share a request.
            in_place_bytes: Some(to_u64(self.request_bytes / 2)),
            concurrency: STREAMS_MAX,
            request_bytes: Some(self.request_bytes),
        }
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.object.read([(offset, into)], check)
    }

    fn fill(&self, reads: &[Read], buffer: SlotBuffer<'_>, check: Check<'_>) -> Result<()> {
        let misfit = |read: &Read| Error::new(Kind::Internal, format!("{read:?} does not fit its slot"));
        let mut parts = Vec::with_capacity(reads.len());
        let (mut rest, mut taken) = (buffer.bytes, 0);
        for read in reads {
            let skip = read.slot_begin.checked_sub(taken).ok_or_else(|| misfit(read))?;
            let (_, after) = rest.split_at_mut_checked(skip).ok_or_else(|| misfit(read))?;
            let (part, after) = after.split_at_mut_checked(read.length).ok_or_else(|| misfit(read))?;
            parts.push((read.offset, part));
            (rest, taken) = (after, read.slot_begin + read.length);
        }
        self.object.read(parts, check)
    }

    fn scatters(&self) -> bool {
        true
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        self.object.read(pieces, check)
    }
}
