//! GPUDirect Storage: bytes go from the disk into device memory and not
//! through the host's.
//!
//! ```text
//! Free --(worker takes)--> Reading --(kernel queued)--> Copying --(kernel done)--> Free
//! ```
//!
//! Reads begin and end at blocks of the file and of a slot in the caller's
//! scratch, and one kernel takes from there what is wanted, of any alignment,
//! to where it belongs, cast if need be. So nothing is ever shifted in place,
//! wherever in the file the data begins.
//!
//! cuFileRead returns when the bytes are there, and no stream orders it. Before
//! it writes to a slot, the host has waited for the kernel that read the slot;
//! and before all reads, the load has waited for what the caller had queued.

use super::cufile::{Driver, Handle, ReadError, Registered};
use super::driver::Event;
use super::kernels::Kernels;
use super::{Cuda, SCRATCH_BYTES_MAX, as_u64, lock, table_of};
use crate::device::{DirectEngine, Scratch};
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::plan::{Chunk, Limits, Read, SlotCopy};
use crate::profile::{self, Count, Stage};
use crate::reader::GAP_BYTES;
use crate::source::{BUSY_WAIT, Source};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Reads begin and end at multiples of this in the file and in memory, or the library moves them through its own.
const BLOCK_BYTES: u64 = 4 << 10;
/// The scratch is registered from a multiple of this on: the size of a GPU's pages.
const PAGE_BYTES: usize = 64 << 10;
/// One slot is read into while a kernel empties the other.
const SLOTS_PER_WORKER: usize = 2;

/// Files that a GPU's memory is filled from.
pub struct Gds {
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
    source: Arc<Source>,
}

/// The slots that no worker has.
#[derive(Default)]
struct Slots {
    /// With the event behind the kernel that empties the slot; the one that was queued first comes first.
    queue: VecDeque<(Slot, Option<Event>)>,
    registered: Option<Registered>,
}

/// A part of the scratch that its holder alone may use.
struct Slot {
    /// Where the scratch begins.
    base: u64,
    /// Where the slot does, from there.
    begin: u64,
}

impl Gds {
    /// Makes the files known to the library.
    ///
    /// # Errors
    /// `device` or `io`: why this machine, this GPU or one of the files cannot be read like this.
    pub fn open<'a>(
        cuda: &Arc<Cuda>,
        sources: impl Iterator<Item = &'a Arc<Source>>,
        options: &Options,
    ) -> Result<Gds> {
        let no_kernels = || Error::new(Kind::Device, "there are no kernels for this GPU, which place the bytes");
        let kernels = Arc::clone(cuda.kernels.as_ref().ok_or_else(no_kernels)?);
        let _bound = cuda.context.bind()?;
        let driver = Driver::open()?;
        let files = sources.map(|source| GdsFile::open(&driver, source)).collect::<Result<_>>()?;
        let block_bytes = to_usize(BLOCK_BYTES);
        let slot_bytes =
            options.chunk_bytes.clamp(2 * block_bytes, (SCRATCH_BYTES_MAX - PAGE_BYTES) / SLOTS_PER_WORKER);
        Ok(Gds {
            slots: Mutex::default(),
            files,
            driver,
            slot_bytes_max: slot_bytes - slot_bytes % block_bytes,
            workers_max: options.threads,
            kernels,
            cuda: Arc::clone(cuda),
        })
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the kernel before an event.
    fn wait(&self, event: Event) -> Result<()> {
        let _span = profile::span(Stage::Wait);
        event.wait()?;
        self.cuda.keep(event);
        Ok(())
    }

    fn unregister(&self, registered: Option<Registered>) {
        let bound = self.cuda.context.bind();
        drop(registered);
        drop(bound);
    }

    /// Reads into a slot from which nothing is copied any more, and queues the kernel that empties it.
    fn read_and_place(
        &self,
        slot: &Slot,
        emptied: Option<Event>,
        file: &GdsFile,
        reads: &[Read],
        copies: &[SlotCopy],
    ) -> Result<Event> {
        emptied.map_or(Ok(()), |event| self.wait(event))?;
        let _bound = self.cuda.context.bind()?;
        for read in reads {
            // SAFETY: the slot is ours, and the host has waited for all who had it before.
            unsafe { file.read(read, slot)? };
        }
        self.place(slot, copies)
    }

    fn place(&self, slot: &Slot, copies: &[SlotCopy]) -> Result<Event> {
        let table = table_of(copies, slot.base + slot.begin)?;
        let event = self.cuda.event()?;
        let copy_stream =
            self.cuda.copy_streams.first().ok_or_else(|| Error::new(Kind::Internal, "there is no lane"))?;
        let copy_stream = lock(copy_stream);
        let queued =
            table.batches().try_for_each(|batch| self.kernels.scatter_inline(batch, copy_stream.stream.handle));
        let recorded = queued.and_then(|()| event.record(&copy_stream.stream));
        match recorded {
            Ok(()) => Ok(event),
            Err(error) => {
                // The kernels that were queued before the one that failed still read the slot.
                copy_stream.stream.settle();
                Err(error)
            }
        }
    }
}

impl DirectEngine for Gds {
    fn limits(&self) -> Limits {
        Limits {
            chunk_bytes: as_u64(self.slot_bytes_max),
            gap_bytes: GAP_BYTES.max(BLOCK_BYTES),
            in_place_bytes: None,
            alignment: BLOCK_BYTES,
            copies_max: usize::MAX,
        }
    }

    fn scratch_bytes(&self, chunk_count: usize, slot_bytes: usize) -> usize {
        if slot_bytes == 0 {
            return 0;
        }
        let fit = (SCRATCH_BYTES_MAX - PAGE_BYTES) / slot_bytes;
        PAGE_BYTES + slot_bytes * chunk_count.min(SLOTS_PER_WORKER * self.workers_max).min(fit)
    }

    fn begin(&self, scratch: Scratch, slot_bytes: usize) -> Result<usize> {
        self.drain()?;
        let Some(count) = to_usize(scratch.bytes).saturating_sub(PAGE_BYTES).checked_div(slot_bytes) else {
            return Ok(1);
        };
        let base = scratch.address.next_multiple_of(as_u64(PAGE_BYTES));
        let bytes = count * slot_bytes;
        let _bound = self.cuda.context.bind()?;
        let registered = Registered::new(&self.driver, base, as_u64(bytes))
            .inspect_err(|error| tracing::info!(%error, "device memory is not registered; reads go through cuFile's"));
        let slot = |index: usize| (Slot { base, begin: as_u64(index * slot_bytes) }, None);
        *self.slots() = Slots { queue: (0..count).map(slot).collect(), registered: registered.ok() };
        Ok(self.workers_max.min(count.div_ceil(SLOTS_PER_WORKER)))
    }

    fn run(&self, chunk: &Chunk) -> Result<()> {
        let internal = |what: &str| Error::new(Kind::Internal, format!("{what}: {chunk:?}"));
        let Chunk::Staged { source, reads, copies, .. } = chunk else {
            return Err(internal("not for a device"));
        };
        let file = self.files.get(*source).ok_or_else(|| internal("no such file"))?;
        let taken = self.slots().queue.pop_front();
        let (slot, emptied) = taken.ok_or_else(|| internal("more workers than slots"))?;
        let result = self.read_and_place(&slot, emptied, file, reads, copies);
        let (event, result) = match result {
            Ok(event) => (Some(event), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.slots().queue.push_back((slot, event));
        result
    }

    fn end(&self) {
        let registered = self.slots().registered.take();
        self.unregister(registered);
    }

    fn drain(&self) -> Result<()> {
        let Slots { queue, registered } = std::mem::take(&mut *self.slots());
        self.unregister(registered);
        let mut result = Ok(());
        for event in queue.into_iter().filter_map(|(_, event)| event) {
            result = result.and(self.wait(event));
        }
        result
    }
}

impl Drop for Gds {
    /// The caller may free scratch and destinations next.
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            tracing::debug!(%error, "a kernel failed after the load had ended");
        }
    }
}

impl GdsFile {
    fn open(driver: &Arc<Driver>, source: &Arc<Source>) -> Result<GdsFile> {
        let file = source
            .reopen_direct()
            .map_err(|error| Error::from_io(error, &source.path, "cannot be opened for direct reads"))?;
        let handle = Handle::register(driver, file).map_err(|error| error.at(&source.path))?;
        Ok(GdsFile { handle, source: Arc::clone(source) })
    }

    /// Fills the blocks of the slot that hold a read.
    ///
    /// # Safety
    /// Nobody else uses the slot.
    unsafe fn read(&self, read: &Read, slot: &Slot) -> Result<()> {
        let _span = profile::span(Stage::Read).bytes(read.length);
        profile::count(Count::Reads, 1);
        let lead = read.offset % BLOCK_BYTES;
        let begin = read.offset - lead;
        let read_end = read.offset + as_u64(read.length);
        let end = read_end.next_multiple_of(BLOCK_BYTES);
        let into = slot.begin + as_u64(read.slot_begin) - lead;
        let mut at = begin;
        while at < read_end {
            let missed = at.max(read.offset);
            // SAFETY: the plan leaves room in the slot for whole blocks, which the caller says are ours.
            match unsafe { self.handle.read(at, end - at, slot.base, into + (at - begin)) } {
                Ok(0) => {
                    let text = format!(
                        "the file ended {} bytes early; it became shorter while it was loaded",
                        read_end - missed
                    );
                    return Err(Error::new(Kind::Io, text).at(&self.source.path).offset(missed));
                }
                Ok(count) => at += as_u64(count),
                Err(ReadError::System(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(ReadError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(BUSY_WAIT),
                Err(ReadError::System(error)) => {
                    return Err(Error::from_io(error, &self.source.path, "cannot read").offset(missed));
                }
                Err(ReadError::Library(name)) => {
                    let text =
                        format!("cuFileRead failed with {name}; FST_READER=auto reads without GPUDirect Storage");
                    return Err(Error::new(Kind::Io, text).at(&self.source.path).offset(missed));
                }
            }
        }
        Ok(())
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
