//! Transfers to the host or to a GPU.

use super::destinations::{cast, decode_destinations};
use super::ffi;
use super::guard::guard;
use crate::cast::elements::Cast;
use crate::checkpoint::region::TensorRegion;
use crate::device::{self, Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::load::transfer::{Batch, Transfer};
use crate::num::to_u64;
use crate::plan::Destination;
use crate::remote;
use crate::staging::pool;
use std::sync::Arc;

/// Transfer to the host or to a GPU, and its prepared batch.
pub(super) struct AnyTransfer {
    transfer: Box<dyn TransferToDevice>,
    regions: Arc<[TensorRegion]>,
    batch: Option<Batch>,
}

/// Operations of a [`Transfer`], whatever its device.
trait TransferToDevice {
    fn can_cast(&self, cast: Cast) -> bool;
    fn prepare(&self, destinations: &[Destination]) -> Result<Batch>;
    /// # Safety
    /// The caller meets the conditions of [`Transfer::fill`].
    unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()>;
    fn finish(self: Box<Self>) -> Result<()>;
}

impl<D: Device> TransferToDevice for Transfer<D> {
    fn can_cast(&self, cast: Cast) -> bool {
        self.planner().can_cast(cast)
    }

    fn prepare(&self, destinations: &[Destination]) -> Result<Batch> {
        self.planner().prepare(destinations)
    }

    unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Transfer::fill(self, batch, scratch) }
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Transfer::finish(*self)
    }
}

impl AnyTransfer {
    pub(super) fn new<D: Device>(transfer: Transfer<D>, regions: Arc<[TensorRegion]>) -> AnyTransfer {
        AnyTransfer { transfer: Box::new(transfer), regions, batch: None }
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| self.transfer.can_cast(cast))
    }

    /// Plans a batch, and returns how much scratch memory it needs, in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination]) -> Result<u64> {
        guard(|| {
            let batch = self.transfer.prepare(&decode_destinations(&self.regions, destinations)?)?;
            Ok(to_u64(self.batch.insert(batch).scratch_bytes()))
        })
    }

    /// Runs the planned batch.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Transfer::fill`].
    pub(super) unsafe fn fill(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let batch = self.batch.take().ok_or_else(|| Error::new(Kind::Internal, "no batch was prepared"))?;
            // SAFETY: the caller's promise.
            unsafe { self.transfer.fill(&batch, Scratch { address, bytes }) }
        })
    }
}

pub(super) fn finish(transfer: Box<AnyTransfer>) -> Result<()> {
    guard(|| transfer.transfer.finish())
}

/// Frees what the process keeps between loads, staging memory, kernels and connections, and returns the bytes of staging
/// memory.
///
/// Loads in progress keep what they use, and the next load allocates what it needs.
pub(super) fn release() -> Result<i64> {
    guard(|| {
        device::release();
        remote::release();
        Ok(i64::try_from(pool::release()).unwrap_or(i64::MAX))
    })
}
