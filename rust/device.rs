//! Where bytes end up. A device copies bytes from staging to addresses of its
//! own and tells when a copy has ended; it knows nothing of files.

pub mod cuda;
pub mod host;

use crate::convert::cast::Cast;
use crate::error::Result;
use crate::options::Options;
use crate::plan::{Chunk, Limits, SlotCopy};
use crate::source::Source;
use std::any::Any;
use std::sync::Arc;

/// Keeps host memory known to a device until it is dropped.
pub type Pinned = Box<dyn Any + Send + Sync>;

/// Memory that a load fills.
pub trait Device: Send + Sync {
    /// A copy that runs.
    type CopyEvent: Send;

    /// A point in the work of the device.
    type StreamEvent: Send + Sync;

    /// Lets the device read host memory by itself. `None` where that is not needed or was refused;
    /// copies work all the same.
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned>;

    /// The PCI address of the device, where it has one.
    fn pci_id(&self) -> Option<String>;

    /// Whether host code may write the device's memory.
    fn is_host(&self) -> bool;

    /// Whether copies to the device can do this to elements.
    fn can_cast(&self, cast: Cast) -> bool;

    /// Makes the device read these files by itself.
    ///
    /// # Errors
    /// Why it cannot.
    fn direct_engine<'a>(
        self: &Arc<Self>,
        sources: impl Iterator<Item = &'a Arc<Source>>,
        options: &Options,
    ) -> Result<Arc<dyn DirectEngine>>;

    /// What a chunk in a slot of at most this size may hold, so that what the device itself puts there fits too.
    fn chunk_limits(&self, slot_bytes: usize) -> ChunkLimits;

    /// What it takes to carry out a chunk of `bytes` with these placements.
    fn chunk_needs(&self, bytes: usize, copies: &[SlotCopy]) -> ChunkNeeds;

    /// The caller's current stream is this one from now on.
    ///
    /// # Errors
    /// `invalid-argument` where the stream cannot be used, `device` from the driver.
    fn set_stream(&self, stream: u64) -> Result<()>;

    /// All that the caller has queued on its current stream.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn record_caller(&self) -> Result<Self::StreamEvent>;

    /// Waits on the host until the device has reached a mark.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn synchronize(&self, event: &Self::StreamEvent) -> Result<()>;

    /// Orders the copies that follow behind a mark, and gives them scratch memory, as much as any of the chunks needs.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn begin(&self, after: &Self::StreamEvent, scratch: Scratch) -> Result<()>;

    /// Starts copies from the first `bytes` of a slot, which stays as it is until the ticket has been waited for.
    /// The device may write to the rest of the slot.
    ///
    /// # Errors
    /// `device`, from the driver; no copy from the slot runs then.
    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<Self::CopyEvent>;

    /// Starts copies to a slot, which nobody else uses until the ticket has been waited for.
    ///
    /// # Errors
    /// `device`, from the driver; no copy to the slot runs then.
    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<Self::CopyEvent>;

    /// Whether a copy has ended, well or not.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn is_done(&self, copy: &Self::CopyEvent) -> Result<bool>;

    /// Waits for the end of a copy.
    ///
    /// # Errors
    /// `device` when the copy failed.
    fn wait(&self, copy: Self::CopyEvent) -> Result<()>;

    /// All copies that have been started.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn record_copies(&self) -> Result<Self::StreamEvent>;

    /// Orders what the caller queues on its current stream from now on behind a mark.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn make_caller_wait(&self, behind: &Self::StreamEvent) -> Result<()>;
}

/// Reads from files straight into memory of a device, where bytes rest in slots of the caller's scratch.
///
/// Dropped, it has waited for what it started.
pub trait DirectEngine: Send + Sync {
    /// What chunks must keep to.
    fn limits(&self) -> Limits;

    /// How much scratch it takes to carry out that many chunks, the largest of which is `slot_bytes` long.
    fn scratch_bytes(&self, chunk_count: usize, slot_bytes: usize) -> usize;

    /// Makes slots of the scratch, which nobody else uses any more, and says how many threads may run chunks at once.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn begin(&self, scratch: Scratch, slot_bytes: usize) -> Result<usize>;

    /// Reads a chunk and starts to copy its bytes to where they go.
    ///
    /// # Errors
    /// `io`, naming the file and the byte; `device`, from the driver. Nothing copies from the chunk's slot then.
    fn run(&self, chunk: &Chunk) -> Result<()>;

    /// Nothing is read into the scratch any more.
    fn end(&self);

    /// Waits for the copies and lets go of the scratch.
    ///
    /// # Errors
    /// `device` when a copy failed.
    fn drain(&self) -> Result<()>;
}

/// The most that a chunk may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLimits {
    /// Bytes of a slot, at most those that were offered.
    pub slot_bytes: usize,
    /// Bytes that are read.
    pub chunk_bytes: usize,
    /// Placements.
    pub copies_max: usize,
}

/// What a chunk needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkNeeds {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of the device's own memory, which all chunks of a filling share.
    pub scratch_bytes: usize,
}

/// Bytes of a device's memory that go to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Where they are.
    pub address: u64,
    /// Where in the slot they go.
    pub slot_begin: usize,
    /// How many they are.
    pub length: usize,
}

/// Memory of the device that the caller lends to a filling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
}
