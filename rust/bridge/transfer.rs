//! Transfers to the host or to a GPU.

use super::destinations::{cast, decode_destinations};
use super::ffi;
use super::guard::guard;
use crate::device::Scratch;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::background::BackgroundTransfer;
use crate::load::staged;
use crate::load::transfer::Batch;
use crate::num::to_u64;
use crate::options::Options;

/// Transfer or stream to the host or to a GPU.
pub(super) enum OnDevice<H, C> {
    Host(H),
    Cuda(C),
}

/// Evaluates an expression for either device.
macro_rules! on_device {
    ($any:expr, $inner:ident => $work:expr) => {
        match $any {
            OnDevice::Host($inner) => $work,
            OnDevice::Cuda($inner) => $work,
        }
    };
}

pub(super) use on_device;

/// Transfer to the host or to a GPU, and its prepared batch.
pub(super) struct AnyTransfer {
    transfer: OnDevice<BackgroundTransfer<Host>, BackgroundTransfer<Cuda>>,
    batch: Option<Batch>,
}

impl AnyTransfer {
    pub(super) fn new(transfer: OnDevice<BackgroundTransfer<Host>, BackgroundTransfer<Cuda>>) -> AnyTransfer {
        AnyTransfer { transfer, batch: None }
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| on_device!(&self.transfer, transfer => transfer.planner().can_cast(cast)))
    }

    /// Plans a batch, and returns how much scratch memory it needs, in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination], scratch_bytes_max: u64) -> Result<u64> {
        guard(|| {
            let batch = on_device!(&self.transfer, transfer => {
                let planner = transfer.planner();
                planner.prepare_within(&decode_destinations(planner.regions(), destinations)?, scratch_bytes_max)
            })?;
            Ok(to_u64(self.batch.insert(batch).scratch_bytes()))
        })
    }

    /// Runs the planned batch.
    ///
    /// # Safety
    /// The caller meets the conditions of [`BackgroundTransfer::fill`].
    pub(super) unsafe fn fill(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let batch = self.take_batch()?;
            // SAFETY: the caller's promise.
            unsafe { on_device!(&mut self.transfer, transfer => transfer.fill(&batch, Scratch { address, bytes })) }
        })
    }

    /// Returns the windows in which the caller should allocate the tensors and submit them.
    pub(super) fn window_ends(&self, order: &[usize]) -> Vec<usize> {
        on_device!(&self.transfer, transfer => transfer.window_ends(order))
    }

    /// Runs the planned batch on a thread.
    ///
    /// # Safety
    /// The caller meets the conditions of [`BackgroundTransfer::submit`].
    pub(super) unsafe fn submit(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let batch = self.take_batch()?;
            // SAFETY: the caller's promise.
            unsafe { on_device!(&mut self.transfer, transfer => transfer.submit(batch, Scratch { address, bytes })) }
        })
    }

    fn take_batch(&mut self) -> Result<Batch> {
        self.batch.take().ok_or_else(|| Error::new(Kind::Internal, "no batch was prepared"))
    }
}

pub(super) fn finish(transfer: Box<AnyTransfer>) -> Result<()> {
    guard(|| on_device!(transfer.transfer, transfer => transfer.finish()))
}

/// Makes ready what large loads to a GPU need, and the process keeps. `stream` is the native handle of the caller's current
/// stream.
pub(super) fn prepare_cuda(ordinal: i32, stream: u64) -> Result<()> {
    guard(|| staged::warm_up(&Cuda::open(ordinal, stream)?, &Options::from_env()?))
}
