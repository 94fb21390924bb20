//! Reader of remote objects.

use super::{ReadLimits, Reader, SlotBuffer};
use crate::error::Result;
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
            unit_bytes: 1,
        }
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.object.read([(offset, into)], check)
    }

    fn fill(&self, reads: &[Read], buffer: SlotBuffer<'_>, check: Check<'_>) -> Result<()> {
        self.object.read(buffer.pieces(reads)?, check)
    }

    fn scatters(&self) -> bool {
        true
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        self.object.read(pieces, check)
    }
}
