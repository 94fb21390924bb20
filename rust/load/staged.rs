//! Engine that reads into staging slots and lets the device copy from there.

use crate::device::engine::{BatchNeeds, Engine, Inspected, Turn, Workers};
use crate::device::{CopyInFlight, Device, DeviceLimits, Scratch};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::options::experiments::{self, Switch};
use crate::os::memory;
use crate::os::mutex::Mutex;
use crate::os::numa::Node;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::plan::{self, Chunk, Limits, Piece, Read, SlotCopy, SlotPart};
use crate::profile::{self, Stage};
use crate::reader::ring::Linux;
use crate::reader::uring::Rings;
use crate::reader::{self, ChosenReader, Opened, ReadLimits, Reader};
use crate::source::Source;
use crate::staging::ahead::PinAhead;
use crate::staging::shared_slot::SharedSlot;
use crate::staging::{self, PAGE_BYTES, Request, Staging, pool};
use std::mem;
use std::sync::{Arc, OnceLock};

/// Smallest size to which requests are divided so that more streams take part, in bytes.
const REQUEST_BYTES_MIN: usize = 512 << 10;

/// Loads of more bytes than this are shared by all workers, where the device reduces chunks. The threads take some tens of
/// microseconds to start, in which one thread reads about half of it.
const SHARED_BYTES_MIN: u64 = 1 << 20;

/// Smallest load during whose opening and allocation a thread pins slots, in bytes. Smaller ones use shorter slots.
const AHEAD_BYTES_MIN: u64 = 256 << 20;

/// Shortest row that goes from a request to its destination by itself, in bytes. Shorter ones are faster to copy out of a
/// slot, all with one loop.
const ROW_BYTES_MIN: usize = 256;

/// Engine with a reader for each file and staging memory for the chunks.
pub struct StagedEngine<D: Device> {
    device: Arc<D>,
    readers: Vec<Opened>,
    /// Limits of the chunks of large loads.
    limits: Limits,
    /// Smallest size to which chunks are reduced, in bytes.
    chunk_bytes_min: Option<u64>,
    staging_bytes: usize,
    /// Size of the slots of large loads, in bytes.
    slot_bytes: usize,
    workers_max: usize,
    /// Largest number of workers that read parts of one chunk.
    workers_per_slot: usize,
    node: Option<Node>,
    /// Dropped before the slots.
    ahead: Mutex<Option<PinAhead>>,
    memory: Mutex<ChunkMemory<D>>,
}

/// Memory for the chunks of a batch, until the engine is drained.
enum ChunkMemory<D: Device> {
    /// The batch has no staged chunk.
    None,
    /// A slot for the only chunk.
    Slot(Request),
    /// Slots for several chunks, and the slot of each chunk that several workers read.
    Staging(Arc<Staging<D>>, Arc<[ChunkSlot]>),
}

/// Shared slot of a chunk, set by the worker that comes first. `None` inside if this worker reads the whole chunk.
type ChunkSlot = OnceLock<Option<SharedSlot>>;

/// Prepares a device, and pins as much staging memory as a large load of cached files uses, or less if the bound or other
/// loads leave less. The next loads use it.
pub fn warm_up<D: Device>(device: &D, options: &Options) -> Result<()> {
    device.warm_up()?;
    let watch = Watch::begin();
    let limits = device.limits(device.local_slot_bytes(whole_pages(options.chunk_bytes)));
    let request = Request { bytes: limits.slot_bytes, node: device.node(), staging_bytes: options.staging_bytes };
    let mut slots = Vec::new();
    while slots.len() < slots_in_use::<D>(options.threads, limits.workers_per_slot)
        && let Some(mut slot) = pool::take(&request, &|| watch.check())?
    {
        slot.pin(|memory| device.pin(memory));
        slots.push(slot);
    }
    Ok(())
}

/// Returns the number of slots that keep a device busy: those that are read into, one that is taken for the next chunk, and
/// those in flight.
fn slots_in_use<D: Device>(threads: usize, workers_per_slot: usize) -> usize {
    threads.div_ceil(workers_per_slot) + 1 + D::copies_ahead()
}

/// Returns a size that slots can have, at most `bytes` if that is a page.
pub fn whole_pages(bytes: usize) -> usize {
    (bytes - bytes % PAGE_BYTES).max(PAGE_BYTES)
}

impl<D: Device> StagedEngine<D> {
    /// Opens a reader for every file.
    pub fn open(sources: &[Source], device: Arc<D>, options: &Options) -> Result<Self> {
        let rings = Arc::new(Rings::new(Linux, options));
        let readers = sources.iter().map(|source| reader::open(options, source, &rings));
        let readers = readers.collect::<Result<Vec<_>>>()?;
        let read_limits = readers.iter().map(|opened| opened.limits()).reduce(ReadLimits::merge);
        let ReadLimits { alignment, gap_bytes, in_place_bytes, concurrency, requests, request_bytes, unit_bytes } =
            read_limits.unwrap_or(ReadLimits::BUFFERED);
        // All streams that a host gets at first take part in a small checkpoint.
        let total_bytes: u64 = sources.iter().map(Source::length).sum();
        let share_bytes = to_usize(total_bytes / to_u64(requests.max(1))).max(REQUEST_BYTES_MIN);
        let request_bytes = request_bytes.map(|bytes| bytes.min(share_bytes.next_multiple_of(PAGE_BYTES)));
        let slot_bytes = request_bytes.unwrap_or_else(|| device.local_slot_bytes(options.chunk_bytes));
        // An element at the end of a block reaches into the next one.
        let slot_bytes = slot_bytes.max(to_usize(alignment.saturating_mul(2))).max(to_usize(unit_bytes));
        let threads = if request_bytes.is_some() { concurrency } else { options.threads.min(concurrency) };
        // A unit that begins at any byte, and what the device adds to a chunk, which is less than a tenth.
        let whole_unit_bytes = if unit_bytes == 1 { 1 } else { unit_bytes + alignment - 1 };
        let missing_bytes = to_usize(whole_unit_bytes).saturating_sub(device.limits(slot_bytes).chunk_bytes);
        let slot_bytes = (slot_bytes + 2 * missing_bytes).next_multiple_of(PAGE_BYTES);
        let DeviceLimits { slot_bytes, chunk_bytes, copies_max, workers_per_slot, reads_in_place, reduced_bytes_min } =
            device.limits(slot_bytes);
        let chunk_bytes = to_u64(chunk_bytes);
        let limits = Limits {
            chunk_bytes: (chunk_bytes - chunk_bytes % alignment).max(alignment),
            gap_bytes,
            in_place_bytes: in_place_bytes.filter(|_| reads_in_place),
            alignment,
            copies_max,
            unit_bytes,
            first_bytes: None,
        };
        // Requests to remote stores have a size of their own.
        let reduced_bytes_min = reduced_bytes_min.filter(|_| request_bytes.is_none());
        let chunk_bytes_min = reduced_bytes_min.map(|least| to_u64(least).max(whole_unit_bytes));
        Ok(StagedEngine {
            node: device.node(),
            device,
            readers,
            limits,
            chunk_bytes_min,
            staging_bytes: options.staging_bytes,
            slot_bytes,
            workers_max: threads.max(1),
            // Slots for requests to stores are filled by one request.
            workers_per_slot: workers_per_slot.min(threads).max(1),
            ahead: Mutex::new(None),
            memory: Mutex::new(ChunkMemory::None),
        })
    }

    fn reader(&self, source: usize) -> Result<&dyn Reader> {
        let missing = || Error::new(Kind::Internal, format!("no reader for file {source}"));
        self.readers.get(source).map(|opened| &*opened.reader).ok_or_else(missing)
    }

    /// Returns memory at an address of the device, if it is host memory, for bytes of a reader.
    ///
    /// # Safety
    /// As for [`Device::host_slice`].
    unsafe fn host_slice<'a>(&self, reader: &dyn Reader, address: u64, length: usize) -> Option<&'a mut [u8]> {
        // SAFETY: the caller's promise.
        let target = unsafe { self.device.host_slice(address, length) }?;
        if !reader.populates() {
            memory::populate(target);
        }
        Some(target)
    }

    /// Returns the destinations of a chunk whose bytes need no slot, or `None` if they need one.
    ///
    /// # Safety
    /// The destinations must be memory of the device that nothing else uses while the slices live.
    unsafe fn pieces<'a>(
        &self,
        reader: &dyn Reader,
        reads: &[Read],
        copies: &[SlotCopy],
    ) -> Option<Vec<(u64, &'a mut [u8])>> {
        let pieces = (self.limits.in_place_bytes.is_some() && reader.scatters())
            .then(|| plan::pieces(reads, copies, ROW_BYTES_MIN))
            .flatten()?;
        // SAFETY: the caller's promise.
        let slice = |piece: Piece| unsafe { self.host_slice(reader, piece.address, piece.length) };
        pieces.into_iter().map(|piece| Some((piece.offset, slice(piece)?))).collect()
    }

    /// Copies a chunk out of memory that the reader lends. Returns whether it did.
    fn copy_lent(&self, reader: &dyn Reader, reads: &[Read], copies: &[SlotCopy]) -> Result<bool> {
        let [read] = reads else { return Ok(false) };
        let mut is_copied = false;
        let is_lent = reader.lend(read, &mut |bytes| {
            let result = self.device.copy_borrowed(bytes, copies);
            is_copied = result.is_some();
            result.unwrap_or(Ok(()))
        })?;
        Ok(is_lent && is_copied)
    }

    /// Returns the requirements for the slots of a batch.
    fn request(&self, needs: &BatchNeeds) -> Request {
        // Large loads use slots of one size, and smaller ones of several chunks few sizes, so that each finds the slots of
        // the previous one in the pool.
        let is_large = needs.staged_bytes >= self.slot_bytes && needs.slot_bytes > self.slot_bytes / 2;
        let bytes = match needs.slot_bytes {
            _ if is_large => self.slot_bytes,
            bytes if needs.staged_bytes > bytes => bytes.next_power_of_two().min(self.slot_bytes),
            bytes => bytes,
        };
        Request { bytes, node: self.node, staging_bytes: self.staging_bytes }
    }

    /// Returns the largest number of slots of `slot_bytes` bytes that a batch uses.
    fn slot_count_max(&self, staged_bytes: usize, slot_bytes: usize) -> usize {
        (self.staging_bytes.min(staged_bytes) / slot_bytes).clamp(1, self.workers_max + D::copies_ahead())
    }

    /// Ensures staging for a batch, with as many slots as the options allow, but no more or larger ones than the batch needs.
    fn ensure_staging(&self, needs: &BatchNeeds, check: Check<'_>) -> Result<()> {
        let request = self.request(needs);
        let count = self.slot_count_max(needs.staged_bytes, request.bytes);
        let present = match &*self.memory.lock() {
            ChunkMemory::Staging(staging, _) if staging.suffices(count, &request) => Some(Arc::clone(staging)),
            _ => None,
        };
        let staging = match present {
            Some(staging) => staging,
            None => {
                // The old slots return to the pool before new ones are taken.
                self.drain(check)?;
                Arc::new(Staging::new(Arc::clone(&self.device), count, request))
            }
        };
        let slots = (0..needs.chunks).map(|_| OnceLock::new()).collect();
        *self.memory.lock() = ChunkMemory::Staging(staging, slots);
        Ok(())
    }
}

impl<D: Device> Engine<D::StreamEvent> for StagedEngine<D> {
    fn readers(&self) -> Vec<ChosenReader> {
        self.readers.iter().map(Opened::chosen).collect()
    }

    fn limits(&self, bytes: u64) -> Limits {
        let Limits { chunk_bytes: most, alignment, .. } = self.limits;
        // A load of one chunk needs no threads.
        let Some(least) = self.chunk_bytes_min.filter(|least| *least < most && bytes > SHARED_BYTES_MIN) else {
            return self.limits;
        };
        let chunk_bytes = bytes.div_ceil(to_u64(self.workers_max)).next_multiple_of(alignment).clamp(least, most);
        let first_bytes = staging::first_chunk_bytes().map(to_u64).filter(|first| chunk_bytes == most && *first < most);
        Limits { chunk_bytes, first_bytes, ..self.limits }
    }

    fn batch_needs(&self, chunks: &[Chunk]) -> BatchNeeds {
        let mut batch = BatchNeeds { chunks: chunks.len(), ..BatchNeeds::default() };
        for chunk in chunks {
            if let Chunk::Staged { bytes, copies, .. } = chunk {
                let chunk = self.device.chunk_needs(*bytes, copies);
                batch.staged_bytes = batch.staged_bytes.saturating_add(chunk.slot_bytes);
                batch.slot_bytes = batch.slot_bytes.max(chunk.slot_bytes.next_multiple_of(PAGE_BYTES));
                batch.scratch_bytes = batch.scratch_bytes.max(chunk.scratch_bytes);
            }
        }
        batch
    }

    fn begin(
        &self,
        after: Option<&D::StreamEvent>,
        needs: &BatchNeeds,
        scratch: Scratch,
        check: Check<'_>,
    ) -> Result<Workers> {
        match after {
            _ if needs.slot_bytes == 0 => {}
            Some(_) => self.ensure_staging(needs, check)?,
            None => {
                self.drain(check)?;
                *self.memory.lock() = ChunkMemory::Slot(self.request(needs));
            }
        }
        self.device.begin(after, scratch)?;
        let divides = after.is_some() && self.readers.iter().any(|opened| opened.reader.divides(&[]));
        let per_chunk = if divides { self.workers_per_slot } else { 1 };
        Ok(Workers { threads: self.workers_max, per_chunk })
    }

    unsafe fn run(
        &self,
        chunk: &Chunk,
        turn: Turn,
        inspected: Option<Inspected<'_>>,
        check: Check<'_>,
    ) -> Result<bool> {
        if inspected.is_none()
            && let Some(is_started) = self.run_part(chunk, turn, check)?
        {
            return Ok(is_started);
        }
        // SAFETY: the caller's promise.
        unsafe { self.run_whole(chunk, inspected, check) }.map(|()| true)
    }

    fn make_ready(&self, bytes: u64) {
        let count = match experiments::value(Switch::PinAhead) {
            _ if !D::PINS => return,
            Some(count) => count,
            // Requests to stores take longer than all pins.
            None if bytes >= AHEAD_BYTES_MIN && self.chunk_bytes_min.is_some() => {
                slots_in_use::<D>(self.workers_max, self.workers_per_slot)
            }
            None => return,
        };
        let request = Request { bytes: self.slot_bytes, node: self.node, staging_bytes: self.staging_bytes };
        let count = count.min(self.slot_count_max(to_usize(bytes), self.slot_bytes));
        if bytes < to_u64(self.slot_bytes) || pool::count_pinned(&request) >= count {
            return;
        }
        let slot_count_max = self.slot_count_max(usize::MAX, self.slot_bytes);
        let staging = Arc::new(Staging::new(Arc::clone(&self.device), slot_count_max, request));
        *self.ahead.lock() = PinAhead::start(&staging, count);
        *self.memory.lock() = ChunkMemory::Staging(staging, Arc::default());
    }

    fn end_reads(&self) {}

    fn drain(&self, check: Check<'_>) -> Result<()> {
        // The slots of the thread return to the pool with the others.
        let ahead = self.ahead.lock().take();
        drop(ahead);
        match mem::replace(&mut *self.memory.lock(), ChunkMemory::None) {
            ChunkMemory::Staging(staging, _) => staging.drain(check),
            ChunkMemory::Slot(_) | ChunkMemory::None => Ok(()),
        }
    }
}

impl<D: Device> StagedEngine<D> {
    /// Reads a part of a chunk, and starts the copies if it is the last one. Returns whether they were started, or `None` if
    /// this worker has to read the whole chunk.
    fn run_part(&self, chunk: &Chunk, turn: Turn, check: Check<'_>) -> Result<Option<bool>> {
        let is_skipped = (turn.index > 0).then_some(false);
        let Chunk::Staged { source, bytes, reads, copies } = chunk else { return Ok(is_skipped) };
        if self.workers_per_slot == 1 {
            return Ok(is_skipped);
        }
        let ChunkMemory::Staging(staging, slots) = self.memory.lock().clone() else { return Ok(is_skipped) };
        let Some(chunk_slot) = slots.get(turn.chunk) else { return Ok(is_skipped) };
        let reader = self.reader(*source)?;
        let mut taken = None;
        let shared = {
            let _span = chunk_slot.get().is_none().then(|| profile::span(Stage::Slot));
            chunk_slot.get_or_init(|| {
                let is_shared = SharedSlot::has_parts(*bytes, self.workers_per_slot) && reader.divides(reads);
                let acquire = || staging.acquire(self.device.chunk_needs(*bytes, copies).slot_bytes, check);
                let slot = if is_shared { acquire().map(Some) } else { Ok(None) };
                let (slot, result) = slot.map_or_else(|error| (None, Err(error)), |slot| (slot, Ok(())));
                taken = Some(result);
                slot.map(|slot| SharedSlot::new(slot, *bytes, self.workers_per_slot))
            })
        };
        let is_first = taken.transpose()?.is_some();
        let fill = |reads: &[Read], part: &mut [u8]| reader.fill(reads, part, check);
        match shared {
            Some(shared) => staging.fill_part(shared, turn.index, reads, copies, fill).map(Some),
            None => Ok(if is_first { None } else { Some(false) }),
        }
    }

    /// Reads a chunk and starts the copies to its destinations.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Engine::run`].
    unsafe fn run_whole(&self, chunk: &Chunk, inspected: Option<Inspected<'_>>, check: Check<'_>) -> Result<()> {
        let internal = |what: &str| Error::new(Kind::Internal, format!("{what}: {chunk:?}"));
        match chunk {
            &Chunk::InPlace { tensor, source, offset, length, address } => {
                acquire_in_turn(inspected, check, || Ok(()))?;
                let reader = self.reader(source)?;
                // SAFETY: the caller's promise, and the plan writes each byte once.
                let into = unsafe { self.host_slice(reader, address, length) };
                let into = into.ok_or_else(|| internal("not host memory"))?;
                reader.read(offset, into, check)?;
                inspected.map_or(Ok(()), |inspected| inspected.inspector.inspect(tensor, offset, into, check))
            }
            Chunk::Staged { source, bytes, reads, copies } => {
                let reader = self.reader(*source)?;
                if inspected.is_none() && self.copy_lent(reader, reads, copies)? {
                    return Ok(());
                }
                let pieces = match inspected {
                    // SAFETY: the caller's promise, and the plan writes each byte once.
                    None => unsafe { self.pieces(reader, reads, copies) },
                    // The inspector sees the bytes in a slot.
                    Some(_) => None,
                };
                if let Some(pieces) = pieces {
                    return reader.scatter(pieces, check);
                }
                let memory = self.memory.lock().clone();
                match memory {
                    ChunkMemory::None => Err(internal("no memory")),
                    ChunkMemory::Slot(request) => {
                        let mut slot = acquire_in_turn(inspected, check, || pool::acquire(&request, check))?;
                        slot.pin(|memory| self.device.pin(memory));
                        reader.fill(reads, slot.bytes_mut(), check)?;
                        inspect(inspected, slot.bytes_mut(), reads, copies, check)?;
                        let mut copy = self.device.copy(slot.bytes_mut(), *bytes, copies)?;
                        let failure = copy.take_failure();
                        slot.hold(copy);
                        // A profile would not see the copy otherwise.
                        if profile::is_on() { failure.and_then(|()| slot.settle(check)) } else { failure }
                    }
                    ChunkMemory::Staging(staging, _) => {
                        let mut slot = acquire_in_turn(inspected, check, || {
                            let _span = profile::span(Stage::Slot);
                            staging.acquire(self.device.chunk_needs(*bytes, copies).slot_bytes, check)
                        })?;
                        let filled = reader.fill(reads, slot.bytes_mut(), check);
                        match filled.and_then(|()| inspect(inspected, slot.bytes_mut(), reads, copies, check)) {
                            Ok(()) => staging.submit(slot, *bytes, copies),
                            Err(error) => {
                                staging.release(slot);
                                Err(error)
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<D: Device> Clone for ChunkMemory<D> {
    fn clone(&self) -> Self {
        match self {
            ChunkMemory::None => ChunkMemory::None,
            ChunkMemory::Slot(request) => ChunkMemory::Slot(*request),
            ChunkMemory::Staging(staging, slots) => ChunkMemory::Staging(Arc::clone(staging), Arc::clone(slots)),
        }
    }
}

/// Acquires memory, after all chunks before this one have theirs if the inspector says so.
fn acquire_in_turn<T>(
    inspected: Option<Inspected<'_>>,
    check: Check<'_>,
    acquire: impl Fn() -> Result<T>,
) -> Result<T> {
    let Some(Inspected { inspector, turn }) = inspected else { return acquire() };
    let mut acquired = None;
    inspector.acquire(turn, check, &mut || {
        acquired = Some(acquire()?);
        Ok(())
    })?;
    acquired.ok_or_else(|| Error::new(Kind::Internal, "no memory was acquired"))
}

/// Lets the inspector see the bytes that will be copied from a slot.
fn inspect(
    inspected: Option<Inspected<'_>>,
    slot: &[u8],
    reads: &[Read],
    copies: &[SlotCopy],
    check: Check<'_>,
) -> Result<()> {
    let Some(Inspected { inspector, .. }) = inspected else { return Ok(()) };
    for copy in copies.iter().filter(|copy| inspector.covers(copy.tensor)) {
        let misfit = || Error::new(Kind::Internal, format!("{copy:?} is in no read of its slot"));
        for part in copy.parts(reads) {
            let SlotPart { slot_begin, offset, length, .. } = part.ok_or_else(misfit)?;
            let bytes = slot.get(slot_begin..slot_begin + length).ok_or_else(misfit)?;
            inspector.inspect(copy.tensor, offset, bytes, check)?;
        }
    }
    Ok(())
}
