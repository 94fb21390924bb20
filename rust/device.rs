//! Devices that a load fills and a save reads: the host and CUDA GPUs.
//!
//! A device copies bytes between staging slots and its own addresses, and reports when a copy has finished. It does
//! not know files, except through an [`Engine`] of its own that reads them.

pub mod cuda;
pub mod engine;
pub mod host;

use crate::cast::elements::Cast;
use crate::error::Result;
use crate::num::to_u64;
use crate::options::Options;
use crate::options::experiments::{self, Switch};
use crate::os::numa::Node;
use crate::os::retry::Check;
use crate::plan::SlotCopy;
use crate::profile::{self, Stage};
use crate::source::Source;
use cuda::{gpu, kernels};
use engine::Engine;
use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Interval at which a thread that waits for a copy queries it, to which the kernel adds its timer slack of 50 us. A copy of
/// 4 MiB takes about 75 us.
const QUERY_INTERVAL: Duration = Duration::from_micros(50);

/// Registration of host memory with a device, until it is dropped.
pub type Pinned = Box<dyn Any + Send + Sync>;

/// Memory that a load fills or a save reads, with the streams that copy to and from it.
///
/// Errors of the driver are `device` errors. A method that uses the caller's stream fails with `invalid-argument` if the
/// stream cannot be used.
pub trait Device: Send + Sync + 'static {
    /// Completion of one call of [`Device::copy`] or [`Device::fetch`].
    type CopyEvent: CopyInFlight + 'static;

    /// Point in the work of one or more streams.
    type StreamEvent: Send + Sync + 'static;

    /// Whether [`Device::pin`] pins memory.
    const PINS: bool;

    /// Number of copies in flight, without the next slot's copy, that keep the device busy: 0 if they are done when
    /// [`Device::copy`] returns.
    const COPIES_AHEAD: usize;

    /// Returns [`Device::COPIES_AHEAD`], or what an experiment puts in its place.
    fn copies_ahead() -> usize {
        let changed = if Self::COPIES_AHEAD == 0 { None } else { experiments::value(Switch::CopiesAhead) };
        changed.unwrap_or(Self::COPIES_AHEAD)
    }

    /// Pins host memory, so that the device can access it directly.
    ///
    /// Returns `None` where this is unnecessary or refused. Copies work without it.
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned>;

    /// Creates what loads create when they first need it, and the process keeps.
    fn warm_up(&self) -> Result<()>;

    /// Returns the NUMA node nearest to the device, or `None` if the machine has only one node or does not say.
    fn node(&self) -> Option<Node>;

    /// Moves this thread, which a load has started to read, near the device, if an experiment asks for it.
    fn place_reader(&self) {}

    /// Returns whether [`Device::copy`] can cast elements like this.
    fn can_cast(&self, cast: Cast) -> bool;

    /// Opens an engine with which the device reads these files itself.
    ///
    /// # Errors
    /// `device` or `io`, with the reason why it cannot.
    fn open_direct_engine<'a>(
        self: &Arc<Self>,
        sources: impl Iterator<Item = &'a Source>,
        options: &Options,
    ) -> Result<Arc<dyn Engine<Self::StreamEvent>>>;

    /// Returns the size of slots for bytes of local files, at most `chunk_bytes`.
    fn local_slot_bytes(&self, chunk_bytes: usize) -> usize {
        chunk_bytes
    }

    /// Returns the limits for chunks that pass through slots of at most `slot_bytes` bytes.
    fn limits(&self, slot_bytes: usize) -> DeviceLimits;

    /// Returns the memory that a staged chunk of `bytes` bytes with these copies needs.
    fn chunk_needs(&self, bytes: usize, copies: &[SlotCopy]) -> ChunkNeeds;

    /// Returns the scratch memory with which fetches of `count` pieces to slots of `slot_bytes` bytes are faster, in bytes.
    fn gather_bytes(&self, slot_bytes: usize, count: usize) -> usize;

    /// Returns the bytes at an address of the device as a slice, or `None` if the host cannot access them.
    ///
    /// Returns `Some` exactly where [`DeviceLimits::reads_in_place`] is true.
    ///
    /// # Safety
    /// `length` bytes from `address` must be memory of the device that nothing else uses while the slice lives.
    unsafe fn host_slice<'a>(&self, address: u64, length: usize) -> Option<&'a mut [u8]>;

    /// Sets the caller's current stream, on the caller's thread.
    fn set_stream(&self, stream: u64) -> Result<()>;

    /// Records an event after all work that the caller has queued on its current stream.
    fn record_caller(&self) -> Result<Self::StreamEvent>;

    /// Begins a batch: the copies that follow wait for `after`, and may use the scratch memory.
    ///
    /// Without `after`, they go to the caller's current stream, which then needs to wait for nothing.
    fn begin(&self, after: Option<&Self::StreamEvent>, scratch: Scratch) -> Result<()>;

    /// Starts copies from the first `bytes` bytes of a slot, which must not change until the copy is done.
    ///
    /// The device may write to the rest of the slot.
    ///
    /// # Errors
    /// `device`, from the driver. No copy from the slot is in flight then. If some copies were started, the error is that
    /// of [`CopyInFlight::take_failure`].
    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<Self::CopyEvent>;

    /// Copies from memory that is no slot, before it returns. Returns `None` if the device copies from slots only.
    fn copy_borrowed(&self, _bytes: &[u8], _copies: &[SlotCopy]) -> Option<Result<()>> {
        None
    }

    /// Starts copies to a slot, which must not be used until the copy is done.
    ///
    /// # Errors
    /// As of [`Device::copy`].
    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<Self::CopyEvent>;

    /// Records an event after all copies that were started.
    fn record_copies(&self) -> Result<Self::StreamEvent>;

    /// Waits on the host for all copies on the copy streams of the load. They may be in flight if `check` ends the wait.
    fn wait_for_copies(&self, check: Check<'_>) -> Result<()>;

    /// Makes work that the caller queues from now on wait for all copies on the copy streams of the load, so that the caller
    /// may free their memory in the order of its current stream. Waits on the host if the driver refuses that.
    fn leave_copies(&self) {
        let order = || self.make_caller_wait(&self.record_copies()?);
        if order().is_err() {
            self.wait_for_copies(&|| Ok(())).unwrap_or_else(|error| tracing::debug!(%error, "a copy has failed"));
        }
    }

    /// Makes work that the caller queues on its current stream from now on wait for an event.
    fn make_caller_wait(&self, event: &Self::StreamEvent) -> Result<()>;
}

/// Copy that was started.
pub trait CopyInFlight: Send {
    /// Returns whether the copy has finished.
    fn is_done(&self) -> Result<bool>;

    /// Fails once if copies could not be started after others, for which the event is.
    fn take_failure(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits on the host until the copy has finished. It may be in flight if `check` ends the wait.
    fn wait(&self, check: Check<'_>) -> Result<()> {
        wait_until(|| self.is_done(), check)
    }
}

/// Waits on the host for work of a device, with queries and sleeps by turns.
///
/// A wait in the driver costs the device an interrupt, and no signal ends it.
fn wait_until(is_done: impl Fn() -> Result<bool>, check: Check<'_>) -> Result<()> {
    let _span = profile::span(Stage::Wait);
    let interval = experiments::value(Switch::QueryMicroseconds).map(|us| Duration::from_micros(to_u64(us)));
    while !is_done()? {
        check()?;
        thread::sleep(interval.unwrap_or(QUERY_INTERVAL));
    }
    Ok(())
}

/// Limits of a device for staged chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Bytes of a slot, at most those offered.
    pub slot_bytes: usize,
    /// Bytes of a chunk. The rest of the slot is for what the device adds to it.
    pub chunk_bytes: usize,
    /// Copies out of one chunk.
    pub copies_max: usize,
    /// Largest number of workers that read parts of one chunk.
    pub workers_per_slot: usize,
    /// Smallest size to which chunks are reduced, so that small loads use all workers and the device has work early, in
    /// bytes. `None` if chunks are not reduced.
    pub reduced_bytes_min: Option<usize>,
    /// Whether reads may go straight into destinations, which [`Device::host_slice`] then returns.
    pub reads_in_place: bool,
}

/// Memory that one staged chunk needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkNeeds {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of scratch memory, which all chunks of a batch share.
    pub scratch_bytes: usize,
}

/// Copy from device memory to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Address of the first byte.
    pub address: u64,
    /// Position of the first byte in the slot.
    pub slot_begin: usize,
    /// Number of bytes.
    pub length: usize,
}

/// Block of device memory that the caller provides for one or more batches.
///
/// Each copy stream of a device uses a fixed part of the block, which depends on the size of the block only. Batches that
/// share a block are therefore given the whole block, even if they need less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes of the whole block.
    pub bytes: u64,
}

/// Gives back what devices keep between loads: the kernels, streams and events of GPUs. The next load creates what it
/// needs.
pub fn release() {
    kernels::release();
    gpu::release();
}
