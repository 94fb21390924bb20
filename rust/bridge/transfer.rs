//! Transfers to the host or to a GPU.

use super::destinations::{cast, decode_destinations, scratch_bytes};
use super::ffi;
use super::guard::guard;
use crate::checkpoint::region::TensorRegion;
use crate::device::Scratch;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::transfer::{self, Batch, Transfer};
use std::sync::Arc;

/// Transfer to the host or to a GPU, and its prepared batch.
pub(super) struct AnyTransfer {
    to: To,
    regions: Arc<[TensorRegion]>,
    batch: Option<Batch>,
}

pub(super) enum To {
    Host(Transfer<Host>),
    Cuda(Transfer<Cuda>),
}

impl AnyTransfer {
    pub(super) fn new(to: To, regions: Arc<[TensorRegion]>) -> AnyTransfer {
        AnyTransfer { to, regions, batch: None }
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| match &self.to {
            To::Host(transfer) => transfer.planner().can_cast(cast),
            To::Cuda(transfer) => transfer.planner().can_cast(cast),
        })
    }

    /// Plans a batch, and returns the size of its scratch memory in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination]) -> Result<u64> {
        guard(|| {
            let destinations = decode_destinations(&self.regions, destinations)?;
            let batch = match &self.to {
                To::Host(transfer) => transfer.planner().prepare(&destinations),
                To::Cuda(transfer) => transfer.planner().prepare(&destinations),
            }?;
            scratch_bytes(self.batch.insert(batch))
        })
    }

    /// Runs the prepared batch.
    ///
    /// # Safety
    /// That of [`Transfer::fill`].
    pub(super) unsafe fn fill(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let batch = self.batch.take().ok_or_else(|| Error::new(Kind::Internal, "no batch was prepared"))?;
            let scratch = Scratch { address, bytes };
            match &mut self.to {
                // SAFETY: the caller's promise is the same.
                To::Host(transfer) => unsafe { transfer.fill(&batch, scratch) },
                // SAFETY: as above.
                To::Cuda(transfer) => unsafe { transfer.fill(&batch, scratch) },
            }
        })
    }
}

pub(super) fn finish(transfer: Box<AnyTransfer>) -> Result<()> {
    guard(|| match transfer.to {
        To::Host(transfer) => transfer.finish(),
        To::Cuda(transfer) => transfer.finish(),
    })
}

/// See [`transfer::release`].
pub(super) fn release() -> Result<i64> {
    guard(|| Ok(i64::try_from(transfer::release()).unwrap_or(i64::MAX)))
}
