//! The loop that runs a plan: workers read chunks and hand them to the device.
//! The only place with concurrency.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::convert::cast::Cast;
use crate::device::cuda::kernels;
use crate::device::host::slice_at;
use crate::device::{Device, DirectEngine, Scratch};
use crate::error::{Error, Kind, Result};
use crate::options::{Options, ReaderChoice};
use crate::os::numa::{self, Node};
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::plan::{Chunk, Destination, Limits, plan};
use crate::profile::{self, Memory, Stage};
use crate::reader::ring::Linux;
use crate::reader::uring::Rings;
use crate::reader::{self, ChosenReader, GAP_BYTES, IN_PLACE_BYTES, MemoryKind, Opened, ReaderKind, SlotBuffer};
use crate::staging::{PAGE_BYTES, Request, Slot, Staging, pool};
use std::sync::Arc;

/// A worker reads into one slot while the device still copies from another.
const SLOTS_PER_WORKER: usize = 2;

/// Fills destinations on one device with the bytes of wanted tensors.
///
/// Several calls of [`Transfer::fill`] share the readers and the staging. What they filled is ready for the
/// caller's stream when [`Transfer::finish`] has returned. Dropped without it, a transfer waits for the copies
/// that run, so that the caller may free the destinations.
///
/// Between chunks it asks its `observer` whether to go on: by default that is Ctrl-C.
pub struct Transfer<D: Device, W: TransferObserver = Watch> {
    planner: Planner<D>,
    options: Options,
    readers: Vec<Opened>,
    staging: Option<Staging<D>>,
    /// Where staging should lie.
    node: Option<Node>,
    observer: W,
}

/// Sees how a transfer goes on.
pub trait TransferObserver: Send + Sync {
    /// Asked before a chunk is begun.
    ///
    /// # Errors
    /// That with which the transfer should end.
    fn check(&self) -> Result<()>;

    /// Told once all copies of a chunk have been started.
    ///
    /// # Errors
    /// That with which the transfer should end.
    fn copies_started(&self, chunk: &Chunk) -> Result<()>;
}

impl TransferObserver for Watch {
    fn check(&self) -> Result<()> {
        Watch::check(self)
    }

    fn copies_started(&self, _: &Chunk) -> Result<()> {
        Ok(())
    }
}

/// Plans the fillings of a transfer, also while it is busy with another.
pub struct Planner<D> {
    regions: Arc<[TensorRegion]>,
    device: Arc<D>,
    /// Where the device reads by itself, nobody else does.
    direct_engine: Option<Arc<dyn DirectEngine>>,
    limits: Limits,
}

/// What one filling does, and what it needs for that.
pub struct Batch {
    chunks: Vec<Chunk>,
    /// Bytes that pass through slots, the largest slot's, and the device's scratch.
    staged_bytes: usize,
    slot_bytes: usize,
    scratch_bytes: usize,
}

impl Batch {
    /// How much memory of the device the caller has to lend for this filling.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Every chunk of the filling, in the order in which they are begun.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }
}

impl<D: Device> Transfer<D> {
    /// A transfer that Ctrl-C ends.
    ///
    /// # Errors
    /// `io` where a reader cannot be opened.
    pub fn open(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        options: Options,
    ) -> Result<Self> {
        Transfer::open_with(checkpoint, regions, device, options, Watch::begin())
    }
}

impl<D: Device, W: TransferObserver> Transfer<D, W> {
    /// Opens a reader for every file of the checkpoint.
    ///
    /// # Errors
    /// `io` where a reader cannot be opened.
    pub fn open_with(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        mut options: Options,
        observer: W,
    ) -> Result<Self> {
        checkpoint.check_headers(regions.iter().map(|tensor| tensor.source))?;
        // Slots are whole pages, and no slot may be larger than a chunk was allowed to be.
        options.chunk_bytes = (options.chunk_bytes - options.chunk_bytes % PAGE_BYTES).max(PAGE_BYTES);
        if options.reader == ReaderChoice::Gds {
            match device.direct_engine(checkpoint.sources(), &options) {
                Ok(direct_engine) => {
                    for source in checkpoint.sources() {
                        profile::reader(&source.path, &source.file, ReaderKind::Gds.name(), "asked for");
                    }
                    let planner =
                        Planner { regions, device, limits: direct_engine.limits(), direct_engine: Some(direct_engine) };
                    return Ok(Transfer { planner, options, readers: Vec::new(), staging: None, node: None, observer });
                }
                Err(error) => tracing::info!(%error, "gds is not to be had; read as with auto"),
            }
        }
        let memory_kind = if device.is_host() { MemoryKind::HostMemory } else { MemoryKind::DeviceMemory };
        let rings = Arc::new(Rings::new(Linux, &options));
        let sources = checkpoint.sources().map(|source| reader::open(&options, source, memory_kind, &rings));
        let readers = sources.collect::<Result<Vec<_>>>()?;
        let alignment = readers.iter().map(|opened| opened.reader.alignment()).max().unwrap_or(1);
        let chunk_limits = device.chunk_limits(options.chunk_bytes);
        options.chunk_bytes = chunk_limits.slot_bytes;
        let chunk_bytes = u64::try_from(chunk_limits.chunk_bytes).unwrap_or(u64::MAX);
        let limits = Limits {
            chunk_bytes: (chunk_bytes - chunk_bytes % alignment).max(alignment),
            gap_bytes: GAP_BYTES.max(alignment),
            in_place_bytes: (device.is_host() && alignment == 1).then_some(IN_PLACE_BYTES),
            alignment,
            copies_max: chunk_limits.copies_max,
        };
        let node = device.pci_id().and_then(|id| numa::of_pci_device(&id));
        let planner = Planner { regions, device, direct_engine: None, limits };
        Ok(Transfer { planner, options, readers, staging: None, node, observer })
    }

    /// The reader of each file and why it was chosen; one for all where the device reads by itself.
    pub fn readers(&self) -> impl Iterator<Item = ChosenReader> {
        let direct_engine = self.planner.direct_engine.iter().map(|_| ChosenReader::new(ReaderKind::Gds, "asked for"));
        direct_engine.chain(self.readers.iter().map(Opened::chosen))
    }

    /// What plans its fillings.
    pub fn planner(&self) -> &Planner<D> {
        &self.planner
    }

    /// Reads what belongs to the destinations of a batch and starts to copy it there.
    ///
    /// # Safety
    /// Every destination is memory of the device, as long as it says, that nobody else uses until the transfer has
    /// finished or is dropped. `scratch` is as long as the batch needs it, and nobody else uses it but behind the
    /// caller's stream.
    ///
    /// # Errors
    /// `io` with file, tensor and byte; `device`, `out-of-memory`, `interrupted`. No copy runs then.
    pub unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()> {
        let after = self.planner.device.record_caller()?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.fill_after(&after, batch, scratch) }?;
        let device = &self.planner.device;
        let ordered = device.record_copies().and_then(|started| device.make_caller_wait(&started));
        ordered.inspect_err(|_| self.drain_after_error())
    }

    /// As [`Transfer::fill`], behind what was queued at a mark; the caller's stream does not wait for the copies.
    ///
    /// # Safety
    /// That of [`Transfer::fill`].
    ///
    /// # Errors
    /// Those of [`Transfer::fill`].
    pub unsafe fn fill_after(&mut self, after: &D::StreamEvent, batch: &Batch, scratch: Scratch) -> Result<()> {
        profile::memory(Memory::Scratch, scratch.bytes);
        let threads = self.begin(after, batch, scratch)?;
        let filled = threads::for_each(threads, batch.chunks.len(), |index| {
            self.observer.check()?;
            batch.chunks.get(index).map_or(Ok(()), |chunk| {
                self.run(chunk)?;
                self.observer.copies_started(chunk)
            })
        });
        if let Some(direct_engine) = &self.planner.direct_engine {
            direct_engine.end();
        }
        filled.inspect_err(|_| self.drain_after_error())
    }

    /// Makes ready for a filling, and says how many threads may carry it out.
    fn begin(&mut self, after: &D::StreamEvent, batch: &Batch, scratch: Scratch) -> Result<usize> {
        let device = Arc::clone(&self.planner.device);
        if let Some(direct_engine) = &self.planner.direct_engine {
            device.begin(after, Scratch::default())?;
            // What the device reads by itself follows no stream.
            device.synchronize(after)?;
            return direct_engine.begin(scratch, batch.slot_bytes);
        }
        self.ensure_staging(batch)?;
        device.begin(after, scratch)?;
        Ok(self.options.threads)
    }

    /// After a failure the caller frees its memory next; the error that came first is the one to tell.
    fn drain_after_error(&self) {
        let direct_engine = self.planner.direct_engine.as_ref().map_or(Ok(()), |direct_engine| direct_engine.drain());
        let staged = self.staging.as_ref().map_or(Ok(()), Staging::drain);
        if let Err(error) = direct_engine.and(staged) {
            tracing::debug!(%error, "while ending a failed load");
        }
    }

    /// Waits for the last copy and gives the staging back, until there is more to fill.
    ///
    /// # Errors
    /// `device` when a copy failed.
    pub fn release_staging(&mut self) -> Result<()> {
        let direct_engine = self.planner.direct_engine.as_ref().map_or(Ok(()), |direct_engine| direct_engine.drain());
        direct_engine.and(self.staging.take().map_or(Ok(()), |staging| staging.drain()))
    }

    /// Waits for the last copy.
    ///
    /// # Errors
    /// `device` when a copy failed.
    pub fn finish(mut self) -> Result<()> {
        self.release_staging()
    }

    /// Makes sure that there is staging with as many slots as the options allow, but no more or larger than there is
    /// work for.
    fn ensure_staging(&mut self, batch: &Batch) -> Result<()> {
        if batch.slot_bytes == 0 {
            return Ok(());
        }
        // All large loads use slots of one size, so that each finds those of the one before.
        let is_large =
            batch.staged_bytes >= self.options.chunk_bytes && batch.slot_bytes > self.options.chunk_bytes / 2;
        let bytes = if is_large { self.options.chunk_bytes } else { batch.slot_bytes };
        // On the host a slot is free again once its bytes are in place.
        let device = &self.planner.device;
        let useful = self.options.threads * if device.is_host() { 1 } else { SLOTS_PER_WORKER };
        let count = (self.options.staging_bytes.min(batch.staged_bytes) / bytes).clamp(1, useful);
        let request = Request { bytes, node: self.node, staging_bytes: self.options.staging_bytes };
        if self.staging.as_ref().is_none_or(|staging| !staging.has(count, &request)) {
            // The old slots go back before new ones are asked for.
            self.release_staging()?;
            self.staging = Some(Staging::new(Arc::clone(&self.planner.device), count, request));
        }
        Ok(())
    }

    fn run(&self, chunk: &Chunk) -> Result<()> {
        if let Some(direct_engine) = &self.planner.direct_engine {
            return direct_engine.run(chunk).map_err(|error| self.planner.name_tensor(chunk, error));
        }
        let reader = |source: usize| {
            let missing = || Error::new(Kind::Internal, format!("no reader for file {source}"));
            self.readers.get(source).map(|opened| &opened.reader).ok_or_else(missing)
        };
        let internal = |what: &str| Error::new(Kind::Internal, format!("{what}: {chunk:?}"));
        match chunk {
            &Chunk::InPlace { source, offset, length, address, .. } => {
                if !self.planner.device.is_host() {
                    return Err(internal("not host memory"));
                }
                // SAFETY: the caller of `fill` gave this memory to the load, and the plan writes each byte once.
                let into = unsafe { slice_at(address, length) };
                reader(source)?.read(offset, into).map_err(|error| self.planner.name_tensor(chunk, error))
            }
            Chunk::Staged { source, bytes, reads, copies } => {
                let reader = reader(*source)?;
                let staging = self.staging.as_ref().ok_or_else(|| internal("no staging"))?;
                let mut slot = staging.acquire(|| self.observer.check())?;
                match reader.fill(reads, buffer(&mut slot)) {
                    Ok(()) => staging.submit(slot, *bytes, copies),
                    Err(error) => {
                        staging.release(slot);
                        Err(self.planner.name_tensor(chunk, error))
                    }
                }
            }
        }
    }
}

impl<D> Clone for Planner<D> {
    fn clone(&self) -> Self {
        let (regions, device) = (Arc::clone(&self.regions), Arc::clone(&self.device));
        Planner { regions, device, direct_engine: self.direct_engine.clone(), limits: self.limits }
    }
}

impl<D: Device> Planner<D> {
    /// Whether elements can be cast on their way.
    pub fn can_cast(&self, cast: Cast) -> bool {
        self.device.can_cast(cast)
    }

    /// Plans a filling.
    ///
    /// # Errors
    /// `internal` for a destination that is not inside its tensor.
    pub fn prepare(&self, destinations: &[Destination]) -> Result<Batch> {
        let _span = profile::span(Stage::Plan);
        let chunks = plan(&self.regions, destinations, &self.limits)?;
        let mut batch = Batch { chunks, staged_bytes: 0, slot_bytes: 0, scratch_bytes: 0 };
        for chunk in &batch.chunks {
            if let Chunk::Staged { bytes, copies, .. } = chunk {
                if self.direct_engine.is_some() {
                    batch.slot_bytes = batch.slot_bytes.max(*bytes);
                    continue;
                }
                let needs = self.device.chunk_needs(*bytes, copies);
                batch.staged_bytes = batch.staged_bytes.saturating_add(needs.slot_bytes);
                batch.slot_bytes = batch.slot_bytes.max(needs.slot_bytes.next_multiple_of(PAGE_BYTES));
                batch.scratch_bytes = batch.scratch_bytes.max(needs.scratch_bytes);
            }
        }
        if let Some(direct_engine) = &self.direct_engine {
            batch.scratch_bytes = direct_engine.scratch_bytes(batch.chunks.len(), batch.slot_bytes);
        }
        Ok(batch)
    }

    /// Adds to an error of a reader, which knows no tensors, the first one of the chunk that misses bytes.
    fn name_tensor(&self, chunk: &Chunk, error: Error) -> Error {
        let Some(position) = error.position() else { return error };
        let mut tensors = chunk.tensors().filter_map(|index| self.regions.get(index));
        match tensors.find(|tensor| position < tensor.range.end()) {
            Some(tensor) => error.tensor(&*tensor.name),
            None => error,
        }
    }
}

/// Gives back what the process keeps between loads: staging, of which it says how many bytes it was, and the kernels on
/// GPUs. Loads that run keep what they use, and the next one brings back what it needs.
pub fn release() -> usize {
    kernels::release();
    pool::release()
}

fn buffer(slot: &mut Slot) -> SlotBuffer<'_> {
    SlotBuffer { id: slot.id(), bytes: slot.bytes_mut() }
}
