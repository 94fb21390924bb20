//! The loop that runs a plan: workers read chunks and hand them to the device.
//! The only place with concurrency.

use crate::checkpoint::Checkpoint;
use crate::device::Device;
use crate::device::host::slice_at;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Watch;
use crate::options::Options;
use crate::plan::{Chunk, Destination, Limits, Wanted, plan};
use crate::reader::{self, DIRECT_BYTES, GAP_BYTES, Reader, Target};
use crate::staging::{PAGE_BYTES, Pool, Slot};
use crate::workers;
use std::sync::Arc;

/// Fills destinations on one device with the bytes of wanted tensors.
///
/// Several calls of [`Transfer::fill`] share the readers and the staging. What they filled is ready for the
/// caller's stream when [`Transfer::finish`] has returned. Dropped without it, a transfer waits for the copies
/// that run, so that the caller may free the destinations.
pub struct Transfer<D: Device> {
    wanted: Arc<[Wanted]>,
    device: Arc<D>,
    options: Options,
    readers: Vec<Box<dyn Reader>>,
    pool: Option<Pool<D>>,
    watch: Watch,
}

impl<D: Device> Transfer<D> {
    /// Opens a reader for every file of the checkpoint.
    ///
    /// # Errors
    /// `io` where a reader cannot be opened.
    pub fn open(checkpoint: &Checkpoint, wanted: Arc<[Wanted]>, device: Arc<D>, mut options: Options) -> Result<Self> {
        // Slots are whole pages, and no slot may be larger than a chunk was allowed to be.
        options.chunk_bytes = (options.chunk_bytes - options.chunk_bytes % PAGE_BYTES).max(PAGE_BYTES);
        let readers = checkpoint
            .sources()
            .map(|source| reader::open(reader::choose(options.reader, source, Target::ExistingMemory)?, source))
            .collect::<Result<_>>()?;
        Ok(Transfer { wanted, device, options, readers, pool: None, watch: Watch::begin() })
    }

    /// Reads what belongs to `destinations` and starts to copy it there.
    ///
    /// # Safety
    /// Every destination is memory of the device, as long as it says, that nobody else uses until the
    /// transfer has finished or is dropped.
    ///
    /// # Errors
    /// `io` with file and byte; `device`, `out-of-memory`, `interrupted`. No copy runs then.
    pub unsafe fn fill(&mut self, destinations: &[Destination]) -> Result<()> {
        let limits = Limits {
            chunk_bytes: u64::try_from(self.options.chunk_bytes).unwrap_or(u64::MAX),
            gap_bytes: GAP_BYTES,
            direct_bytes: self.device.is_host().then_some(DIRECT_BYTES),
        };
        let chunks = plan(&self.wanted, destinations, &limits)?;
        self.make_room(&chunks)?;
        self.device.begin()?;
        let run = workers::for_each(self.options.threads, chunks.len(), |index| {
            self.watch.check()?;
            chunks.get(index).map_or(Ok(()), |chunk| self.run(chunk))
        })
        .and_then(|()| self.device.end());
        if run.is_err()
            && let Some(pool) = &self.pool
            && let Err(error) = pool.drain()
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
        self.pool.as_ref().map_or(Ok(()), Pool::drain)
    }

    /// Makes a pool with as many slots as the options allow, but no more or larger than there is work for,
    /// unless the one of an earlier call will do.
    fn make_room(&mut self, chunks: &[Chunk]) -> Result<()> {
        let staged_bytes = chunks.iter().filter_map(|chunk| match chunk {
            Chunk::Staged { bytes, .. } => Some(*bytes),
            Chunk::Direct { .. } => None,
        });
        let Some(largest) = staged_bytes.clone().max() else { return Ok(()) };
        let slot_bytes = largest.next_multiple_of(PAGE_BYTES);
        let total_bytes = staged_bytes.fold(0, usize::saturating_add);
        // On the host a slot is free again once its bytes are in place, so more slots than workers would idle.
        let useful = if self.device.is_host() { self.options.threads } else { usize::MAX };
        let slot_count = (self.options.staging_bytes.min(total_bytes) / slot_bytes).clamp(1, useful);
        if self.pool.as_ref().is_none_or(|pool| !pool.has(slot_count, slot_bytes)) {
            // The old memory goes before the new comes, so that both together never exceed the bound.
            if let Some(old) = self.pool.take() {
                old.drain()?;
            }
            self.pool = Some(Pool::new(Arc::clone(&self.device), slot_count, slot_bytes)?);
        }
        Ok(())
    }

    fn run(&self, chunk: &Chunk) -> Result<()> {
        let reader = |source: usize| {
            let missing = || Error::new(Kind::Internal, format!("no reader for file {source}"));
            self.readers.get(source).ok_or_else(missing)
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
            Chunk::Staged { source, reads, placements, .. } => {
                let reader = reader(*source)?;
                let pool = self.pool.as_ref().ok_or_else(|| internal("no staging"))?;
                let mut slot = pool.acquire()?;
                let filled = reads.iter().try_for_each(|read| {
                    let into = part(&mut slot, read.slot_begin, read.length);
                    reader.read(read.offset, into.ok_or_else(|| internal("larger than its slot"))?)
                });
                match filled {
                    Ok(()) => pool.submit(slot, placements),
                    Err(error) => {
                        pool.release(slot);
                        Err(error)
                    }
                }
            }
        }
    }
}

fn part(slot: &mut Slot, begin: usize, length: usize) -> Option<&mut [u8]> {
    slot.bytes_mut().get_mut(begin..begin.checked_add(length)?)
}
