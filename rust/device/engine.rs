//! Interface of an engine, which moves the chunks of a plan from files to a device.
//!
//! A transfer opens one engine and keeps it. Engines differ in who reads: the staged engine reads into host memory and
//! lets the device copy from there, and a direct engine lets the device read.

use super::Scratch;
use crate::error::Result;
use crate::os::retry::Check;
use crate::plan::{Chunk, Limits};
use crate::reader::ChosenReader;

/// Engine of a transfer, on a device whose events are of type `E`.
///
/// For each batch, a transfer calls [`Engine::begin`], [`Engine::run`] for every chunk on any of its threads, in order, and
/// [`Engine::end_reads`]. It does not begin a batch while another runs. Planning may take place at any time.
///
/// An engine that is dropped waits for its copies, so that the caller may free scratch memory and destinations.
pub trait Engine<E>: Send + Sync {
    /// Returns the reader of each file and the reason for it, or one reader for all files.
    fn readers(&self) -> Vec<ChosenReader>;

    /// Returns the limits of the chunks of a batch of `bytes` bytes.
    fn limits(&self, bytes: u64) -> Limits;

    /// Returns the memory that a batch of these chunks needs.
    fn batch_needs(&self, chunks: &[Chunk]) -> BatchNeeds;

    /// Begins a batch after the work before `after`, and returns the threads that may run its chunks.
    ///
    /// Without `after`, the batch has at most one chunk, whose copies go to the caller's current stream.
    fn begin(&self, after: Option<&E>, needs: &BatchNeeds, scratch: Scratch, check: Check<'_>) -> Result<Workers>;

    /// Reads a chunk and starts the copies to its destinations. Returns whether the copies were started: a chunk has as many
    /// calls as [`Workers::per_chunk`] says, each of which may read a part of the chunk. Calls `check` while it waits for memory, and before it
    /// repeats a read. Only an engine that has all bytes in host memory takes an inspector.
    ///
    /// # Safety
    /// The destinations of the chunk are memory of the device that nothing else uses until the engine is drained.
    ///
    /// # Errors
    /// `io`, with the path and the byte; `device`, `out-of-memory`, or the error of `check` or of the inspector. No copy
    /// out of the memory of this chunk is in flight then.
    unsafe fn run(&self, chunk: &Chunk, turn: Turn, inspected: Option<Inspected<'_>>, check: Check<'_>)
    -> Result<bool>;

    /// Makes staging memory ready for a load of `bytes` bytes, while the caller allocates its destinations.
    fn make_ready(&self, _bytes: u64) {}

    /// Ends the reads of a batch. Copies may still be in flight.
    fn end_reads(&self);

    /// Waits for all copies and gives back the memory that the engine holds between batches. If `check` ends the wait, later
    /// work of the caller waits for the copies instead.
    fn drain(&self, check: Check<'_>) -> Result<()>;
}

/// Threads for the chunks of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Workers {
    /// Number of threads.
    pub threads: usize,
    /// Largest number of threads that read parts of one chunk.
    pub per_chunk: usize,
}

/// Turn of a worker at a chunk.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Number of the chunk in the batch.
    pub chunk: usize,
    /// Number of this turn among those at the chunk. With an inspector, there is one.
    pub index: usize,
}

/// Sees the bytes of chunks before they are copied to their destinations.
pub trait Inspector: Send + Sync {
    /// Calls `acquire`, which takes memory for the chunk that is started as number `turn` of its batch.
    fn acquire(&self, turn: usize, check: Check<'_>, acquire: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Returns whether bytes of a tensor region have to be inspected.
    fn covers(&self, tensor: usize) -> bool;

    /// Inspects bytes of a tensor region, which are at `offset` in its file.
    ///
    /// # Errors
    /// The reason why the bytes must not be copied; the error of `check`.
    fn inspect(&self, tensor: usize, offset: u64, bytes: &[u8], check: Check<'_>) -> Result<()>;
}

/// Inspector of a chunk, and the chunk's number in the order in which the chunks of its batch are started.
#[derive(Clone, Copy)]
pub struct Inspected<'a> {
    /// The inspector.
    pub inspector: &'a dyn Inspector,
    /// Number of the chunk.
    pub turn: usize,
}

/// Memory that a batch needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchNeeds {
    /// Number of chunks.
    pub chunks: usize,
    /// Bytes that pass through slots of host memory.
    pub staged_bytes: usize,
    /// Bytes of the largest slot.
    pub slot_bytes: usize,
    /// Bytes of scratch memory on the device.
    pub scratch_bytes: usize,
}
