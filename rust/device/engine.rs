//! Interface of an engine, which moves the chunks of a plan from files to a device.
//!
//! A transfer opens one engine and keeps it. Engines differ in who reads: the staged engine reads into host memory and
//! lets the device copy from there, and a direct engine lets the device read.

use super::Scratch;
use crate::error::Result;
use crate::plan::{Chunk, Limits};
use crate::reader::ChosenReader;

/// Engine of a transfer, on a device whose events are of type `E`.
///
/// For each batch, a transfer calls [`Engine::begin`], [`Engine::run`] for every chunk on any of its threads, and
/// [`Engine::end_reads`]. It does not begin a batch while another runs. Planning may take place at any time.
///
/// An engine that is dropped waits for its copies, so that the caller may free scratch memory and destinations.
pub trait Engine<E>: Send + Sync {
    /// Returns the reader of each file and the reason for it, or one reader for all files.
    fn readers(&self) -> Vec<ChosenReader>;

    /// Returns the limits of the chunks that the engine runs.
    fn limits(&self) -> Limits;

    /// Returns the memory that a batch of these chunks needs.
    fn batch_needs(&self, chunks: &[Chunk]) -> BatchNeeds;

    /// Begins a batch after the work before `after`, and returns the number of threads that may run its chunks.
    ///
    /// Without `after`, the batch has at most one chunk, whose copies go to the caller's current stream.
    ///
    /// # Errors
    /// `device` or `out-of-memory`.
    fn begin(&self, after: Option<&E>, needs: &BatchNeeds, scratch: Scratch) -> Result<usize>;

    /// Reads a chunk and starts the copies to its destinations. Calls `check` while it waits for memory, and before it
    /// repeats a read.
    ///
    /// # Safety
    /// The destinations of the chunk are memory of the device that nothing else uses until the engine is drained.
    ///
    /// # Errors
    /// `io`, with the path and the byte; `device`, `out-of-memory`, or the error of `check`. No copy out of the memory
    /// of this chunk is in flight then.
    unsafe fn run(&self, chunk: &Chunk, check: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Ends the reads of a batch. Copies may still be in flight.
    fn end_reads(&self);

    /// Waits for all copies and gives back the memory that the engine holds between batches.
    ///
    /// # Errors
    /// `device` if a copy failed.
    fn drain(&self) -> Result<()>;
}

/// Memory that a batch needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchNeeds {
    /// Bytes that pass through slots of host memory.
    pub staged_bytes: usize,
    /// Bytes of the largest slot.
    pub slot_bytes: usize,
    /// Bytes of scratch memory on the device.
    pub scratch_bytes: usize,
}
