//! The loop that runs a plan: workers read chunks and hand them to the device.
//! The only place with concurrency.

use crate::cast::Cast;
use crate::checkpoint::Checkpoint;
use crate::device::cuda::kernels;
use crate::device::host::slice_at;
use crate::device::{Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Watch;
use crate::options::Options;
use crate::plan::{Chunk, Destination, Limits, Wanted, plan};
use crate::profile::{self, Memory, Stage};
use crate::reader::ring::Linux;
use crate::reader::uring::Rings;
use crate::reader::{self, Buffer, Chosen, DIRECT_BYTES, GAP_BYTES, Opened, Target};
use crate::staging::{PAGE_BYTES, Request, Slot, Staging, numa, pool};
use crate::workers;
use std::sync::Arc;

/// A worker reads into one slot while the device still copies from another.
const SLOTS_PER_WORKER: usize = 2;

/// Fills destinations on one device with the bytes of wanted tensors.
///
/// Several calls of [`Transfer::fill`] share the readers and the staging. What they filled is ready for the
/// caller's stream when [`Transfer::finish`] has returned. Dropped without it, a transfer waits for the copies
/// that run, so that the caller may free the destinations.
pub struct Transfer<D: Device> {
    wanted: Arc<[Wanted]>,
    device: Arc<D>,
    options: Options,
    limits: Limits,
    readers: Vec<Opened>,
    staging: Option<Staging<D>>,
    watch: Watch,
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
}

impl<D: Device> Transfer<D> {
    /// Opens a reader for every file of the checkpoint.
    ///
    /// # Errors
    /// `io` where a reader cannot be opened.
    pub fn open(checkpoint: &Checkpoint, wanted: Arc<[Wanted]>, device: Arc<D>, mut options: Options) -> Result<Self> {
        // Slots are whole pages, and no slot may be larger than a chunk was allowed to be.
        options.chunk_bytes = (options.chunk_bytes - options.chunk_bytes % PAGE_BYTES).max(PAGE_BYTES);
        let target = if device.is_host() { Target::HostMemory } else { Target::DeviceMemory };
        let rings = Arc::new(Rings::new(Linux, &options));
        let sources = checkpoint.sources().map(|source| reader::open(&options, source, target, &rings));
        let readers = sources.collect::<Result<Vec<_>>>()?;
        let alignment = readers.iter().map(|opened| opened.reader.alignment()).max().unwrap_or(1);
        let room = device.room(options.chunk_bytes);
        let chunk_bytes = u64::try_from(room.chunk_bytes).unwrap_or(u64::MAX);
        let limits = Limits {
            chunk_bytes: (chunk_bytes - chunk_bytes % alignment).max(alignment),
            gap_bytes: GAP_BYTES.max(alignment),
            direct_bytes: (device.is_host() && alignment == 1).then_some(DIRECT_BYTES),
            alignment,
            placements_max: room.placements_max,
        };
        Ok(Transfer { wanted, device, options, limits, readers, staging: None, watch: Watch::begin() })
    }

    /// The reader of each file and why it was chosen.
    pub fn readers(&self) -> impl Iterator<Item = Chosen> {
        self.readers.iter().map(Opened::chosen)
    }

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
        let chunks = plan(&self.wanted, destinations, &self.limits)?;
        for destination in destinations {
            self.device.expect(destination.address, destination.target_bytes());
        }
        let mut batch = Batch { chunks, staged_bytes: 0, slot_bytes: 0, scratch_bytes: 0 };
        for chunk in &batch.chunks {
            if let Chunk::Staged { bytes, placements, .. } = chunk {
                let needs = self.device.needs(*bytes, placements);
                batch.staged_bytes = batch.staged_bytes.saturating_add(needs.slot_bytes);
                batch.slot_bytes = batch.slot_bytes.max(needs.slot_bytes.next_multiple_of(PAGE_BYTES));
                batch.scratch_bytes = batch.scratch_bytes.max(needs.scratch_bytes);
            }
        }
        Ok(batch)
    }

    /// Reads what belongs to the destinations of a batch and starts to copy it there.
    ///
    /// # Safety
    /// Every destination is memory of the device, as long as it says, that nobody else uses until the transfer has
    /// finished or is dropped. `scratch` is as long as the batch needs it, and nobody else uses it but behind the
    /// caller's stream.
    ///
    /// # Errors
    /// `io` with file and byte; `device`, `out-of-memory`, `interrupted`. No copy runs then.
    pub unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()> {
        profile::memory(Memory::Scratch, scratch.bytes);
        self.make_room(batch)?;
        self.device.begin(scratch)?;
        let run = workers::for_each(self.options.threads, batch.chunks.len(), |index| {
            self.watch.check()?;
            batch.chunks.get(index).map_or(Ok(()), |chunk| self.run(chunk))
        })
        .and_then(|()| self.device.end());
        if run.is_err()
            && let Some(staging) = &self.staging
            && let Err(error) = staging.drain()
        {
            // The caller frees its memory next; the error that came first is the one to tell.
            tracing::debug!(%error, "while ending a failed load");
        }
        run
    }

    /// Waits for the last copy.
    ///
    /// # Errors
    /// `device` when a copy failed.
    pub fn finish(self) -> Result<()> {
        self.staging.as_ref().map_or(Ok(()), Staging::drain)
    }

    /// Makes sure that there is staging with as many slots as the options allow, but no more or larger than there is
    /// work for.
    fn make_room(&mut self, batch: &Batch) -> Result<()> {
        if batch.slot_bytes == 0 {
            return Ok(());
        }
        // All large loads use slots of one size, so that each finds those of the one before.
        let is_large =
            batch.staged_bytes >= self.options.chunk_bytes && batch.slot_bytes > self.options.chunk_bytes / 2;
        let bytes = if is_large { self.options.chunk_bytes } else { batch.slot_bytes };
        // On the host a slot is free again once its bytes are in place.
        let useful = self.options.threads * if self.device.is_host() { 1 } else { SLOTS_PER_WORKER };
        let count = (self.options.staging_bytes.min(batch.staged_bytes) / bytes).clamp(1, useful);
        let request = Request {
            bytes,
            node: self.device.pci_id().and_then(|id| numa::of_pci_device(&id)),
            staging_bytes: self.options.staging_bytes,
        };
        if self.staging.as_ref().is_none_or(|staging| !staging.has(count, &request)) {
            // The old slots go back before new ones are asked for.
            if let Some(old) = self.staging.take() {
                old.drain()?;
            }
            self.staging = Some(Staging::new(Arc::clone(&self.device), count, request));
        }
        Ok(())
    }

    fn run(&self, chunk: &Chunk) -> Result<()> {
        let reader = |source: usize| {
            let missing = || Error::new(Kind::Internal, format!("no reader for file {source}"));
            self.readers.get(source).map(|opened| &opened.reader).ok_or_else(missing)
        };
        let internal = |what: &str| Error::new(Kind::Internal, format!("{what}: {chunk:?}"));
        match chunk {
            &Chunk::Direct { source, offset, length, address } => {
                if !self.device.is_host() {
                    return Err(internal("not host memory"));
                }
                // SAFETY: the caller of `fill` gave this memory to the load, and the plan writes each byte once.
                reader(source)?.read(offset, unsafe { slice_at(address, length) })
            }
            Chunk::Staged { source, bytes, reads, placements } => {
                let reader = reader(*source)?;
                let staging = self.staging.as_ref().ok_or_else(|| internal("no staging"))?;
                let mut slot = staging.acquire(|| self.watch.check())?;
                match reader.fill(reads, buffer(&mut slot)) {
                    Ok(()) => staging.submit(slot, *bytes, placements),
                    Err(error) => {
                        staging.release(slot);
                        Err(error)
                    }
                }
            }
        }
    }
}

/// Gives back what the process keeps between loads: staging, of which it says how many bytes it was, and the kernels on
/// GPUs. Loads that run keep what they use, and the next one brings back what it needs.
pub fn release() -> usize {
    kernels::release();
    pool::release()
}

fn buffer(slot: &mut Slot) -> Buffer<'_> {
    Buffer { id: slot.id(), bytes: slot.bytes_mut() }
}
