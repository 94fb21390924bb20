//! Transfers, which plan batches of destinations and run them: threads read chunks and hand them to the device.

use crate::cast::elements::Cast;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::verify::Coverage;
use crate::device::engine::{BatchNeeds, Engine, Inspected, Turn, Workers};
use crate::device::{Device, Scratch};
use crate::error::{Error, Result};
use crate::load::staged::{StagedEngine, whole_pages};
use crate::load::verifier::Verifier;
use crate::num::to_u64;
use crate::options::{Options, ReaderChoice};
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::plan::{Chunk, Destination, plan};
use crate::profile::{self, Memory, Stage};
use crate::reader::ChosenReader;
use crate::source::Source;
use std::sync::Arc;

/// Smallest chunks of a plan for little scratch memory, in bytes.
const CHUNK_BYTES_MIN: u64 = 64 << 10;

/// Fills destinations on one device with the bytes of tensor regions.
///
/// Several calls of [`Transfer::fill`] share the readers and the staging memory. The tensors are ready on the caller's
/// stream when [`Transfer::finish`] has returned. A transfer that is dropped before waits for its copies, so that the
/// caller may free the destinations. The copies of a batch of one chunk are part of the work on the caller's stream, and
/// neither waits for them.
///
/// The observer decides before each chunk whether to go on. The default observer ends the transfer on SIGINT.
///
/// If the checkpoint is to be verified, no byte is copied before it is hashed. The last chunk of bytes with a digest fails
/// if the digest differs.
pub struct Transfer<D: Device, O: TransferObserver = Watch> {
    planner: Planner<D>,
    observer: O,
    verifier: Option<Verifier>,
}

/// Observes the progress of a transfer.
pub trait TransferObserver: Send + Sync {
    /// Called before each chunk, and while a worker waits for memory.
    fn check(&self) -> Result<()>;

    /// Called during a wait for copies, after which the caller may free the destinations.
    ///
    /// # Errors
    /// `interrupted` after a SIGINT, which ends the wait.
    fn check_interrupt(&self) -> Result<()>;

    /// Called after all copies of a chunk have been started.
    fn copies_started(&self, chunk: &Chunk) -> Result<()>;
}

impl TransferObserver for Watch {
    fn check(&self) -> Result<()> {
        Watch::check(self)
    }

    fn check_interrupt(&self) -> Result<()> {
        Watch::check(self)
    }

    fn copies_started(&self, _: &Chunk) -> Result<()> {
        Ok(())
    }
}

/// Plans the batches of a transfer, also while the transfer runs another one.
pub struct Planner<D: Device> {
    regions: Arc<[TensorRegion]>,
    device: Arc<D>,
    engine: Arc<dyn Engine<D::StreamEvent>>,
}

/// Planned batch of destinations.
pub struct Batch {
    chunks: Vec<Chunk>,
    needs: BatchNeeds,
}

impl Batch {
    /// Returns how much device memory the caller has to provide for the batch, in bytes.
    pub fn scratch_bytes(&self) -> usize {
        self.needs.scratch_bytes
    }

    /// Returns the chunks in the order in which they are started.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }
}

impl<D: Device> Transfer<D> {
    /// Opens a transfer that SIGINT ends.
    pub fn open(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        options: Options,
    ) -> Result<Self> {
        Transfer::open_with(checkpoint, regions, device, options, Watch::begin())
    }

    /// Opens a transfer to destinations that are only parts of the regions. It compares the groups that it reads.
    pub fn open_divided(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        options: Options,
    ) -> Result<Self> {
        checkpoint.check_due()?;
        checkpoint.check_headers(regions.iter().map(|tensor| tensor.source))?;
        let engine = open_engine(&checkpoint.sources_in_groups()?, &device, options, false)?;
        Ok(Transfer { planner: Planner { regions, device, engine }, observer: Watch::begin(), verifier: None })
    }
}

impl<D: Device, O: TransferObserver> Transfer<D, O> {
    /// Opens a transfer from the files of a checkpoint, and chooses its engine.
    pub fn open_with(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        options: Options,
        observer: O,
    ) -> Result<Self> {
        checkpoint.check_due()?;
        checkpoint.check_headers(regions.iter().map(|tensor| tensor.source))?;
        let (verifier, sources) = match checkpoint.coverage(&regions)? {
            Some(Coverage { inputs, covers, sources, .. }) => (Some(Verifier::new(inputs, covers)?), sources),
            None => (None, checkpoint.sources().cloned().collect()),
        };
        let engine = open_engine(&sources, &device, options, verifier.is_some())?;
        engine.make_ready(regions.iter().map(TensorRegion::bytes).fold(0, u64::saturating_add));
        Ok(Transfer { planner: Planner { regions, device, engine }, observer, verifier })
    }

    /// Replaces the observer.
    pub fn map_observer<P: TransferObserver>(self, observer: impl FnOnce(O) -> P) -> Transfer<D, P> {
        Transfer { planner: self.planner, observer: observer(self.observer), verifier: self.verifier }
    }

    /// Returns the digests that the transfer compares, if the checkpoint is to be verified.
    pub fn verifier(&self) -> Option<&Verifier> {
        self.verifier.as_ref()
    }

    /// Returns the reader of each file and the reason for it, or one reader for all files.
    pub fn readers(&self) -> Vec<ChosenReader> {
        self.planner.engine.readers()
    }

    /// Returns the planner of the transfer's batches.
    pub fn planner(&self) -> &Planner<D> {
        &self.planner
    }

    /// Reads the bytes of a batch and starts the copies to its destinations.
    ///
    /// # Safety
    /// Every destination must be memory of the device, of the planned size, that nothing else uses until the transfer
    /// has finished or is dropped. `scratch` must have at least the size that the batch needs, and only work on the
    /// caller's stream that is queued later may use it.
    ///
    /// # Errors
    /// `io`, with path, tensor and byte; `device`, `out-of-memory`, `interrupted`. No copy is in flight then.
    pub unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()> {
        if batch.chunks.len() <= 1 {
            // Its copies would overlap with no other. On the caller's own stream they need no events.
            // SAFETY: the caller's promise.
            return unsafe { self.run(None, batch, scratch) };
        }
        let after = self.planner.record_caller()?;
        // SAFETY: the caller's promise.
        unsafe { self.fill_after(&after, batch, scratch) }?;
        self.make_caller_wait()
    }

    /// Does what [`Transfer::fill`] does, after the work before an event. The caller's stream does not wait for it.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Transfer::fill`]. Later batches may use the same block, if each of them is
    /// given the whole block.
    pub unsafe fn fill_after(&mut self, after: &D::StreamEvent, batch: &Batch, scratch: Scratch) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run(Some(after), batch, scratch) }
    }

    /// Makes the caller's stream wait for all copies that were started.
    ///
    /// # Errors
    /// `invalid-argument` if the stream cannot be used, `device` from the driver. No copy is in flight then.
    pub fn make_caller_wait(&self) -> Result<()> {
        let device = &self.planner.device;
        let ordered = device.record_copies().and_then(|copies| device.make_caller_wait(&copies));
        ordered.inspect_err(|_| self.drain_after_error())
    }

    /// Runs a batch as [`Engine::begin`] says.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Transfer::fill`].
    unsafe fn run(&mut self, after: Option<&D::StreamEvent>, batch: &Batch, scratch: Scratch) -> Result<()> {
        profile::memory(Memory::Scratch, scratch.bytes);
        let Planner { engine, .. } = &self.planner;
        let verifier = self.verifier.as_ref();
        let check = || verifier.map_or(Ok(()), Verifier::check).and_then(|()| self.observer.check());
        let Workers { threads, per_chunk } = engine.begin(after, &batch.needs, scratch, &check)?;
        // A chunk is hashed as a whole.
        let turns = if verifier.is_some() { 1 } else { per_chunk };
        let order = verifier.map(|verifier| verifier.begin(&batch.chunks));
        let start = || self.planner.device.place_reader();
        let filled = threads::for_each_after(start, threads, batch.chunks.len() * turns, |index| {
            let turn = Turn { chunk: index / turns, index: index % turns };
            let index = order.as_ref().map_or(Some(turn.chunk), |order| order.get(turn.chunk).copied());
            let run = |chunk| {
                check()?;
                let inspected = verifier.map(|inspector| Inspected { inspector, turn: turn.chunk });
                // SAFETY: the caller's promise about the destinations of the batch.
                let run = unsafe { engine.run(chunk, turn, inspected, &check) };
                let is_started = run.map_err(|error| self.planner.name_tensor(chunk, error))?;
                if is_started { self.observer.copies_started(chunk) } else { Ok(()) }
            };
            let result = index.and_then(|index| batch.chunks.get(index)).map_or(Ok(()), run);
            result.map_err(|error| match verifier {
                Some(verifier) => verifier.fail(error),
                None => error,
            })
        });
        engine.end_reads();
        filled.inspect_err(|_| self.drain_after_error())
    }

    /// Waits for the copies after an error, because the caller frees its memory next. A later error is only logged.
    fn drain_after_error(&self) {
        if let Err(error) = self.release_staging() {
            tracing::debug!(%error, "while ending a failed load");
        }
    }

    /// Waits for all copies and gives back staging memory until the next batch. After an interrupt, later work of the caller's
    /// stream waits for the copies instead.
    pub fn release_staging(&self) -> Result<()> {
        self.planner.engine.drain(&|| self.observer.check_interrupt())
    }

    /// Waits for all copies, as [`Transfer::release_staging`] does.
    pub fn finish(self) -> Result<()> {
        self.release_staging()?;
        self.verifier.as_ref().map_or(Ok(()), Verifier::finish)
    }
}

/// Chooses the engine of a transfer: a direct one if it is requested and available, else the staged one, which alone has
/// the bytes in host memory to verify them.
fn open_engine<D: Device>(
    sources: &[Source],
    device: &Arc<D>,
    mut options: Options,
    is_verified: bool,
) -> Result<Arc<dyn Engine<D::StreamEvent>>> {
    // Slots are not larger than the requested chunk size.
    options.chunk_bytes = whole_pages(options.chunk_bytes);
    options.request_bytes = whole_pages(options.request_bytes);
    if options.reader == ReaderChoice::Gds && !is_verified {
        match device.open_direct_engine(sources.iter(), &options) {
            Ok(engine) => return Ok(engine),
            Err(error) => tracing::info!(%error, "gds is not available; reads as with auto"),
        }
    }
    Ok(Arc::new(StagedEngine::open(sources, Arc::clone(device), &options)?))
}

impl<D: Device> Clone for Planner<D> {
    fn clone(&self) -> Self {
        let Planner { regions, device, engine } = self;
        Planner { regions: Arc::clone(regions), device: Arc::clone(device), engine: Arc::clone(engine) }
    }
}

impl<D: Device> Planner<D> {
    /// Returns the tensor regions of the transfer.
    pub fn regions(&self) -> &Arc<[TensorRegion]> {
        &self.regions
    }

    /// Records an event after the work that the caller has queued.
    pub fn record_caller(&self) -> Result<D::StreamEvent> {
        self.device.record_caller()
    }

    /// Returns whether elements can be cast while they are copied.
    pub fn can_cast(&self, cast: Cast) -> bool {
        self.device.can_cast(cast)
    }

    /// Plans a batch.
    pub fn prepare(&self, destinations: &[Destination]) -> Result<Batch> {
        self.prepare_within(destinations, u64::MAX)
    }

    /// Plans a batch that needs at most this number of bytes of scratch memory, if small chunks need so little.
    pub fn prepare_within(&self, destinations: &[Destination], scratch_bytes_max: u64) -> Result<Batch> {
        let _span = profile::span(Stage::Plan);
        let bytes = destinations.iter().map(|destination| destination.end.saturating_sub(destination.begin));
        let mut limits = self.engine.limits(bytes.fold(0, u64::saturating_add));
        loop {
            let chunks = plan(&self.regions, destinations, &limits)?;
            let needs = self.engine.batch_needs(&chunks);
            let half = limits.chunk_bytes / 2;
            let smaller = half - half % limits.alignment.max(1);
            let is_possible = smaller >= CHUNK_BYTES_MIN.max(2 * limits.alignment).max(2 * limits.unit_bytes);
            if to_u64(needs.scratch_bytes) <= scratch_bytes_max || !is_possible {
                return Ok(Batch { chunks, needs });
            }
            (limits.chunk_bytes, limits.copies_max) = (smaller, (limits.copies_max / 2).max(1));
        }
    }

    /// Adds the name of the first affected tensor to the error of a reader, which does not know tensors.
    fn name_tensor(&self, chunk: &Chunk, error: Error) -> Error {
        let Some(position) = error.position() else { return error };
        let mut tensors = chunk.tensors().filter_map(|index| self.regions.get(index));
        match tensors.find(|tensor| position < tensor.range.end()) {
            Some(tensor) => error.tensor(&*tensor.name),
            None => error,
        }
    }
}
