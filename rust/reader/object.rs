//! Reader of remote objects.

use super::{ReadLimits, Reader, pieces_of};
use crate::error::Result;
use crate::num::to_u64;
use crate::options::Options;
use crate::os::retry::Check;
use crate::plan::Read;
use crate::remote::transfer::limits::{GAP_BYTES, REQUESTS_MAX};
use crate::remote::transfer::object::Object;
use std::sync::Arc;

/// Reader that requests ranges of an object.
pub struct ObjectReader {
    object: Arc<Object>,
    request_bytes: usize,
    gap_bytes: u64,
}

impl ObjectReader {
    /// Creates a reader.
    pub fn new(object: Arc<Object>, options: &Options) -> Self {
        let gap_bytes = if options.leaves_gaps { 0 } else { GAP_BYTES };
        ObjectReader { object, request_bytes: options.request_bytes, gap_bytes }
    }
}

impl Reader for ObjectReader {
    fn limits(&self) -> ReadLimits {
        ReadLimits {
            alignment: 1,
            gap_bytes: self.gap_bytes,
            // Smaller tensors share a request.
            in_place_bytes: Some(to_u64(self.request_bytes / 2)),
            concurrency: REQUESTS_MAX,
            requests: self.object.requests_at_start(),
            request_bytes: Some(self.request_bytes),
            unit_bytes: 1,
        }
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.object.read_joined([(offset, into)], self.gap_bytes, check)
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        self.object.read_joined(pieces_of(slot, reads)?, self.gap_bytes, check)
    }

    fn scatters(&self) -> bool {
        true
    }

    fn populates(&self) -> bool {
        true
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        self.object.read_joined(pieces, self.gap_bytes, check)
    }
}
