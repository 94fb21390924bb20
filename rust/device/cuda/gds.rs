//! Engine for GPUDirect Storage: the GPU reads from the disk into its own memory, not through host memory.
//!
//! ```text
//! Free --(worker takes)--> Reading --(kernel queued)--> Copying --(kernel done)--> Free
//! ```
//!
//! Reads cover whole blocks of the file, and fill blocks of a slot in the caller's scratch memory. From there one
//! kernel copies the requested bytes, of any alignment, to their destinations, and casts them. So the data section of
//! a file may begin at any byte.
//!
//! cuFileRead returns when the bytes have arrived, and no stream orders it. Before a read into a slot, the host waits
//! for the kernel that read from the slot. Before the first read of a batch, the host waits for all work that the
//! caller has queued.

use super::cufile::{Driver, Handle, ReadError, RegisteredBuffer};
use super::driver::Event;
use super::gpu::Lent;
use super::kernels::Kernels;
use super::table::table_of;
use super::{Cuda, SCRATCH_BYTES_MAX};
use crate::device::engine::{BatchNeeds, Engine, Inspected, Turn, Workers};
use crate::device::{CopyInFlight, Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::local_file::LocalFile;
use crate::os::mutex::Mutex;
use crate::os::retry::{self, Check};
use crate::os::sigint::Watch;
use crate::plan::{Chunk, Limits, Read, SlotCopy};
use crate::profile::{self, Count, Stage};
use crate::reader::{ChosenReader, ReadLimits, ReaderKind};
use crate::source::Source;
use std::collections::VecDeque;
use std::sync::Arc;

/// Alignment of reads in the file and in memory, in bytes. cuFile copies other reads through buffers of its own.
const BLOCK_BYTES: u64 = 4 << 10;
/// A worker reads into one slot while the kernel empties another.
const SLOTS_PER_WORKER: usize = 2;
/// Page size of a GPU, in bytes, to which registered memory is aligned.
const GPU_PAGE_BYTES: usize = 64 << 10;

/// Engine with which a GPU reads files into its own memory.
pub struct DirectEngine {
    slots: Mutex<Slots>,
    files: Vec<GdsFile>,
    driver: Arc<Driver>,
    slot_bytes_max: usize,
    workers_max: usize,
    kernels: Arc<Kernels>,
    cuda: Arc<Cuda>,
}

struct GdsFile {
    handle: Handle,
    source: Arc<LocalFile>,
}

/// The slots that no worker holds.
#[derive(Default)]
struct Slots {
    /// Each slot with the event after the kernel that empties it, the oldest first.
    queue: VecDeque<(Slot, Option<Lent<Event>>)>,
    registered: Option<RegisteredBuffer>,
}

/// Part of the scratch memory that only its owner uses.
struct Slot {
    /// Address of the registered memory.
    base: u64,
    /// Position of the slot after `base`, in bytes.
    begin: u64,
}

impl DirectEngine {
    /// Opens the files for reads by the GPU.
    ///
    /// # Errors
    /// `device` or `io`, with the reason why this machine, this GPU or one of the files does not support it.
    pub fn open<'a>(
        cuda: &Arc<Cuda>,
        sources: impl Iterator<Item = &'a Source>,
        options: &Options,
    ) -> Result<DirectEngine> {
        let no_kernels = || Error::new(Kind::Device, "this build has no kernels for this GPU, which copy the bytes");
        let kernels = Arc::clone(cuda.kernels().ok_or_else(no_kernels)?);
        let _bound = cuda.gpu.context.bind()?;
        let driver = Driver::open()?;
        let remote = || Error::new(Kind::Device, "GPUDirect Storage reads local files only");
        let open = |source: &Source| GdsFile::open(&driver, source.file().ok_or_else(remote)?);
        let files = sources.map(open).collect::<Result<Vec<_>>>()?;
        for GdsFile { source, .. } in &files {
            profile::reader(&source.path, Some(&source.file), ReaderKind::Gds.name(), chosen().why.as_ref());
        }
        let block_bytes = to_usize(BLOCK_BYTES);
        let slot_bytes =
            options.chunk_bytes.clamp(2 * block_bytes, (SCRATCH_BYTES_MAX - GPU_PAGE_BYTES) / SLOTS_PER_WORKER);
        Ok(DirectEngine {
            slots: Mutex::default(),
            files,
            driver,
            slot_bytes_max: slot_bytes - slot_bytes % block_bytes,
            workers_max: options.threads,
            kernels,
            cuda: Arc::clone(cuda),
        })
    }

    fn unregister(&self, registered: Option<RegisteredBuffer>) {
        let bound = self.cuda.gpu.context.bind();
        drop(registered);
        drop(bound);
    }

    /// Reads into an empty slot, and queues the kernels that empty it. Returns the event after them, and the error of those
    /// that could not be queued.
    fn read_and_copy(
        &self,
        slot: &Slot,
        file: &GdsFile,
        reads: &[Read],
        copies: &[SlotCopy],
        check: Check<'_>,
    ) -> Result<(Lent<Event>, Result<()>)> {
        let _bound = self.cuda.gpu.context.bind()?;
        for read in reads {
            // SAFETY: this worker owns the slot, and the host has waited for the kernel that used it last.
            unsafe { file.read(read, slot, check)? };
        }
        self.copy(slot, copies)
    }

    fn copy(&self, slot: &Slot, copies: &[SlotCopy]) -> Result<(Lent<Event>, Result<()>)> {
        let table = table_of(copies, slot.base + slot.begin)?;
        let event = self.cuda.gpu.event()?;
        let lane = self.cuda.lane(true)?;
        let queued = table.batches().try_for_each(|batch| self.kernels.scatter_inline(batch, lane.stream));
        // The kernels queued before a failed one still read the slot.
        match event.record(lane.stream) {
            Ok(()) => Ok((event, queued)),
            Err(error) => {
                self.cuda.gpu.settle(lane.stream);
                queued.and(Err(error))
            }
        }
    }
}

impl Engine<Vec<Arc<Lent<Event>>>> for DirectEngine {
    fn readers(&self) -> Vec<ChosenReader> {
        vec![chosen()]
    }

    fn limits(&self, _: u64) -> Limits {
        let ReadLimits { alignment, gap_bytes, in_place_bytes, .. } = ReadLimits::direct(BLOCK_BYTES);
        let chunk_bytes = to_u64(self.slot_bytes_max);
        Limits {
            chunk_bytes,
            gap_bytes,
            in_place_bytes,
            alignment,
            copies_max: usize::MAX,
            unit_bytes: 1,
            first_bytes: None,
        }
    }

    fn batch_needs(&self, chunks: &[Chunk]) -> BatchNeeds {
        let bytes = chunks.iter().map(|chunk| match chunk {
            Chunk::Staged { bytes, .. } => *bytes,
            Chunk::InPlace { .. } => 0,
        });
        let slot_bytes = bytes.max().unwrap_or(0);
        if slot_bytes == 0 {
            return BatchNeeds::default();
        }
        let fit = (SCRATCH_BYTES_MAX - GPU_PAGE_BYTES) / slot_bytes;
        let slot_count = chunks.len().min(SLOTS_PER_WORKER * self.workers_max).min(fit);
        BatchNeeds {
            chunks: chunks.len(),
            staged_bytes: 0,
            slot_bytes,
            scratch_bytes: GPU_PAGE_BYTES + slot_bytes * slot_count,
        }
    }

    fn begin(
        &self,
        after: Option<&Vec<Arc<Lent<Event>>>>,
        needs: &BatchNeeds,
        scratch: Scratch,
        check: Check<'_>,
    ) -> Result<Workers> {
        self.cuda.begin(after, Scratch::default())?;
        match after {
            Some(after) => after.iter().try_for_each(|event| event.wait(check))?,
            None => self.cuda.record_caller()?.iter().try_for_each(|event| event.wait(check))?,
        }
        self.drain(check)?;
        let slot_bytes = needs.slot_bytes;
        let Some(count) = to_usize(scratch.bytes).saturating_sub(GPU_PAGE_BYTES).checked_div(slot_bytes) else {
            return Ok(Workers { threads: 1, per_chunk: 1 });
        };
        if count == 0 {
            let message = format!(
                "the GPU has no memory of {slot_bytes} bytes for GPUDirect Storage; FST_READER=auto needs none"
            );
            return Err(Error::new(Kind::OutOfMemory, message));
        }
        let base = scratch.address.next_multiple_of(to_u64(GPU_PAGE_BYTES));
        let bytes = count * slot_bytes;
        let _bound = self.cuda.gpu.context.bind()?;
        let registered = RegisteredBuffer::new(&self.driver, base, to_u64(bytes)).inspect_err(
            |error| tracing::info!(%error, "scratch memory is not registered; reads go through cuFile's buffers"),
        );
        let slot = |index: usize| (Slot { base, begin: to_u64(index * slot_bytes) }, None);
        *self.slots.lock() = Slots { queue: (0..count).map(slot).collect(), registered: registered.ok() };
        Ok(Workers { threads: self.workers_max.min(count.div_ceil(SLOTS_PER_WORKER)), per_chunk: 1 })
    }

    unsafe fn run(&self, chunk: &Chunk, _: Turn, _: Option<Inspected<'_>>, check: Check<'_>) -> Result<bool> {
        let internal = |what: &str| Error::new(Kind::Internal, format!("{what}: {chunk:?}"));
        let Chunk::Staged { source, reads, copies, .. } = chunk else {
            return Err(internal("a read into host memory"));
        };
        let file = self.files.get(*source).ok_or_else(|| internal("no such file"))?;
        let taken = self.slots.lock().queue.pop_front();
        let (slot, emptied) = taken.ok_or_else(|| internal("more workers than slots"))?;
        let (event, result) = match emptied.as_ref().map_or(Ok(()), |event| event.wait(check)) {
            Ok(()) => match self.read_and_copy(&slot, file, reads, copies, check) {
                Ok((event, queued)) => (Some(event), queued),
                Err(error) => (None, Err(error)),
            },
            // A kernel still reads the slot.
            Err(error) => (emptied, Err(error)),
        };
        self.slots.lock().queue.push_back((slot, event));
        result.map(|()| true)
    }

    fn end_reads(&self) {
        let registered = self.slots.lock().registered.take();
        self.unregister(registered);
    }

    fn drain(&self, check: Check<'_>) -> Result<()> {
        let Slots { queue, registered } = std::mem::take(&mut *self.slots.lock());
        self.unregister(registered);
        let mut result = Ok(());
        for event in queue.into_iter().filter_map(|(_, event)| event) {
            result = result.and_then(|()| event.wait(check));
        }
        if result.is_err() {
            self.cuda.leave_copies();
        }
        result
    }
}

impl Drop for DirectEngine {
    /// Waits for the kernels, because the caller may free scratch memory and destinations next.
    fn drop(&mut self) {
        let watch = Watch::begin();
        if let Err(error) = self.drain(&|| watch.check()) {
            tracing::debug!(%error, "a kernel failed after the load had ended");
        }
    }
}

impl GdsFile {
    fn open(driver: &Arc<Driver>, source: &Arc<LocalFile>) -> Result<GdsFile> {
        let file = source
            .reopen_direct()
            .map_err(|error| Error::from_io(error, &source.path, "cannot be opened for direct reads"))?;
        let handle = Handle::register(driver, file).map_err(|error| error.at(&source.path))?;
        Ok(GdsFile { handle, source: Arc::clone(source) })
    }

    /// Reads all blocks of a read into the slot.
    ///
    /// # Safety
    /// Nothing else uses the slot.
    unsafe fn read(&self, read: &Read, slot: &Slot, check: Check<'_>) -> Result<()> {
        let _span = profile::span(Stage::Read).bytes(read.length);
        profile::count(Count::Reads, 1);
        let lead = read.offset % BLOCK_BYTES;
        let begin = read.offset - lead;
        let read_end = read.offset + to_u64(read.length);
        let end = read_end.next_multiple_of(BLOCK_BYTES);
        let into = slot.begin + to_u64(read.slot_begin) - lead;
        let mut at = begin;
        while at < read_end {
            let missing = at.max(read.offset);
            let failed = |text: String| Error::new(Kind::Io, text).at(&self.source.path).offset(missing);
            // SAFETY: the plan leaves room for whole blocks in the slot, which the caller owns.
            match unsafe { self.handle.read(at, end - at, slot.base, into + (at - begin)) } {
                Ok(0) => {
                    let bytes = read_end - missing;
                    return Err(failed(format!(
                        "the file ended {bytes} bytes early; it became shorter while it was loaded"
                    )));
                }
                Ok(count) => at += to_u64(count),
                Err(ReadError::System(error)) if retry::prepare(&error, check)? => {}
                Err(ReadError::System(error)) => {
                    return Err(Error::from_io(error, &self.source.path, "cannot read").offset(missing));
                }
                Err(ReadError::Library(name)) => {
                    return Err(failed(format!(
                        "cuFileRead failed with {name}; FST_READER=auto reads without GPUDirect Storage"
                    )));
                }
            }
        }
        Ok(())
    }
}

fn chosen() -> ChosenReader {
    ChosenReader::new(ReaderKind::Gds, "requested")
}
