//! An NVIDIA GPU, through the CUDA driver, which is opened at run time. Only this file and its folder name cudarc.
//!
//! Copies run on copy streams of the device, so that they overlap with the caller's work. Events order them with the
//! caller's current stream. Copies wait for the work queued before them, because the allocator may have returned
//! memory whose last use is still queued. Work queued after them waits for the copies. The copies of a batch of one chunk
//! go to the caller's stream itself, which orders them without events.
//!
//! Few large copies go through the copy engine straight to their destinations, all on one copy stream. Many small,
//! strided or cast copies go up as one: the chunk and a table of its copies are copied to scratch memory, from where one
//! kernel scatters them. Such chunks alternate between two copy streams:
//!
//! ```text
//! copy stream 0   | copy chunk 0 | kernel |  copy chunk 2  | kernel |
//! copy stream 1         waits    | copy chunk 1 | kernel |  copy chunk 3 ...
//! ```

pub mod convert;
mod cufile;
pub mod driver;
mod gds;
pub mod gpu;
pub mod kernels;
mod table;
mod timing;

use super::engine::Engine;
use super::{ChunkNeeds, CopyInFlight, Device, DeviceLimits, Fetch, Pinned, Scratch, wait_until};
use crate::cast::elements::Cast;
use crate::cast::scatter::{StridedCopy, TASK_BYTES, Table, has_cast};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::options::experiments::{self, Switch};
use crate::os::mutex::Mutex;
use crate::os::numa::{self, Node};
use crate::os::retry::Check;
use crate::plan::SlotCopy;
use crate::profile::{self, Count, Stage};
use crate::source::Source;
use cudarc::driver::sys;
use driver::{Event, Registered, check};
use gds::DirectEngine;
use gpu::{CopyStreams, Gpu, Lent};
use kernels::{IMAGE, Kernels};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock};
use table::{COPIES_MAX, bytes_of, is_gathered, is_scattered, table_of};
use timing::{Laps, Timer};

/// Number of copy streams for chunks with a kernel, which runs while the copy engine copies the next chunk.
const COPY_STREAMS: usize = 2;
/// Number of workers that read one chunk. They fill a slot of 4 MiB in twice the time in which it is copied.
const WORKERS_PER_SLOT: usize = 8;
/// The table behind a chunk takes up to 1/16 of the slot.
const TABLE_DIVISOR: usize = 16;
/// Alignment of the table in a slot, in bytes.
const TABLE_ALIGNMENT: usize = 16;
/// Smallest size to which chunks are reduced, in bytes. A copy of 512 KiB takes 10 us, and queueing it costs half of that.
const CHUNK_BYTES_MIN: usize = 512 << 10;
/// Alignment of each copy stream's part of the scratch memory, in bytes.
const SCRATCH_ALIGNMENT: usize = 512;
/// Upper bound for scratch memory, in bytes, whatever the chunk size.
pub const SCRATCH_BYTES_MAX: usize = 64 << 20;

/// A GPU during one load or save, and the caller's current stream on it.
pub struct Cuda {
    copy_lanes: [Mutex<Lane>; COPY_STREAMS],
    /// Number of chunks with a kernel, which alternate between the lanes.
    kernel_chunks: AtomicUsize,
    caller_lane: Mutex<Lane>,
    /// Whether the copies of the batch go to the caller's stream.
    is_on_caller: AtomicBool,
    /// Loaded when a plan first needs them; `None` inside if there are none for the GPU.
    kernels: OnceLock<Option<Arc<Kernels>>>,
    timer: Option<Arc<Timer>>,
    /// The caller's current stream.
    current: AtomicPtr<sys::CUstream_st>,
    /// Streams of `copy_lanes`, which no other load uses.
    _copy_streams: Lent<CopyStreams>,
    gpu: Arc<Gpu>,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Cuda {}
// SAFETY: as above, and the driver serializes calls on one handle.
unsafe impl Sync for Cuda {}

/// A stream, and scratch memory that only work on this stream uses.
///
/// A thread locks it while it queues work, so that nothing comes between a copy and its kernel.
struct Lane {
    index: usize,
    stream: sys::CUstream,
    scratch: Scratch,
    /// Events for which the stream waits before its next work.
    after: Vec<Arc<Lent<Event>>>,
    /// Whether the load has queued work on the stream.
    is_used: bool,
}

/// Event after the copies of one slot.
pub struct CopyEvent {
    event: Lent<Event>,
    /// Error of the first copy that could not be queued.
    failure: Option<Error>,
    _laps: Laps,
    /// The kernels, one of which may be part of the copy, stay loaded until it is done.
    _kernels: Option<Arc<Kernels>>,
}

impl CopyInFlight for CopyEvent {
    fn is_done(&self) -> Result<bool> {
        self.event.is_done()
    }

    fn take_failure(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Cuda {
    /// Opens the GPU with this ordinal. `current` is the native handle of the caller's current stream on it.
    ///
    /// # Errors
    /// `device` if there is no driver or no such GPU, `invalid-argument` if the stream cannot be used.
    pub fn open(ordinal: i32, current: u64) -> Result<Cuda> {
        let gpu = Gpu::of(ordinal)?;
        let current = gpu.context.stream_of_caller(current)?;
        let copy_streams = gpu.copy_streams()?;
        let lane = |index, stream| {
            Mutex::new(Lane { index, stream, scratch: Scratch::default(), after: Vec::new(), is_used: false })
        };
        let [first, second] = &*copy_streams;
        Ok(Cuda {
            copy_lanes: [lane(0, first.handle), lane(1, second.handle)],
            kernel_chunks: AtomicUsize::new(0),
            caller_lane: lane(COPY_STREAMS, ptr::null_mut()),
            is_on_caller: AtomicBool::new(false),
            kernels: OnceLock::new(),
            timer: Timer::start(&gpu.context, ordinal)?,
            current: AtomicPtr::new(current),
            _copy_streams: copy_streams,
            gpu,
        })
    }

    /// Returns the caller's current stream, unless it is being captured.
    fn current(&self) -> Result<sys::CUstream> {
        let current = self.current.load(Ordering::Relaxed);
        self.gpu.context.refuse_capture(current)?;
        Ok(current)
    }

    /// Records an event after all work queued on a stream.
    fn record(&self, stream: sys::CUstream) -> Result<Arc<Lent<Event>>> {
        let event = self.gpu.event()?;
        event.record(stream)?;
        Ok(Arc::new(event))
    }

    /// Makes work queued on a stream from now on wait for events.
    fn wait_for(&self, events: &[Arc<Lent<Event>>], stream: sys::CUstream) -> Result<()> {
        let _bound = self.gpu.context.bind()?;
        events.iter().try_for_each(|event| {
            // SAFETY: events and stream belong to the context, which is current.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event.handle, 0) })
        })
    }

    /// Locks the lane for the next work of the batch, whose stream waits for the work before the batch.
    ///
    /// Copies without a kernel share one stream. The copy engine runs them one after the other anyway, and each change of
    /// the stream may cost it time.
    fn lane(&self, has_kernel: bool) -> Result<MutexGuard<'_, Lane>> {
        if self.is_on_caller.load(Ordering::Relaxed) {
            return Ok(self.caller_lane.lock());
        }
        let [first, second] = &self.copy_lanes;
        let is_first = !has_kernel || self.kernel_chunks.fetch_add(1, Ordering::Relaxed).is_multiple_of(COPY_STREAMS);
        let mut lane = if is_first { first } else { second }.lock();
        self.wait_for(&lane.after, lane.stream)?;
        lane.after.clear();
        lane.is_used = true;
        Ok(lane)
    }

    /// Returns the kernels for a plan, and loads them if this is the first one that needs them.
    fn kernels(&self) -> Option<&Arc<Kernels>> {
        self.kernels.get_or_init(|| Kernels::of(&self.gpu.context)).as_ref()
    }

    /// Returns the kernels if a plan has needed them. Chunks are queued as planned, and load nothing.
    fn planned_kernels(&self) -> Option<&Arc<Kernels>> {
        self.kernels.get().and_then(Option::as_ref)
    }

    /// Queues work that uses a slot on the next lane. If this fails, no such work is in flight. The event of work that fails
    /// belongs to the copies before, which still use the slot, and holds the error.
    fn queue(&self, has_kernel: bool, work: impl FnOnce(&Lane, &mut Laps) -> Result<()>) -> Result<CopyEvent> {
        let _bound = self.gpu.context.bind()?;
        let lane = self.lane(has_kernel)?;
        let event = self.gpu.event()?;
        let mut laps = Laps::start(self.timer.as_ref(), lane.index, lane.stream)?;
        let failure = work(&lane, &mut laps).err();
        match event.record(lane.stream) {
            Ok(()) => Ok(CopyEvent { event, failure, _laps: laps, _kernels: self.planned_kernels().cloned() }),
            Err(error) => {
                self.gpu.settle(lane.stream);
                Err(failure.unwrap_or(error))
            }
        }
    }

    /// Queues one copy of the chunk and its table to the scratch memory, and one kernel.
    fn scatter(&self, lane: &Lane, slot: &mut [u8], bytes: usize, copies: &[SlotCopy], laps: &mut Laps) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("{} copies do not fit their slot", copies.len()));
        let kernels = self.planned_kernels().ok_or_else(misfit)?;
        let table = table_of(copies, lane.scratch.address)?;
        let table_begin = bytes.next_multiple_of(TABLE_ALIGNMENT);
        let length = table_begin + table.bytes();
        if to_u64(length) > lane.scratch.bytes {
            if copies.iter().any(|copy| copy.cast.is_some()) {
                let message =
                    format!("the GPU has no memory of {length} bytes for a cast; free some, or load without dtype");
                return Err(Error::new(Kind::OutOfMemory, message));
            }
            copies.iter().try_for_each(|copy| self.copy_rows(lane, slot, copy))?;
            return laps.record(Stage::Copy, bytes_of(copies), lane.stream);
        }
        table.write_to(slot.get_mut(table_begin..length).ok_or_else(misfit)?)?;
        let from = slot.as_ptr().cast::<c_void>();
        // SAFETY: the slot does not change until the copy is done. The scratch memory belongs to the batch, and only
        // this stream uses this part of it.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(lane.scratch.address, from, length, lane.stream) };
        check("cuMemcpyHtoDAsync", result)?;
        profile::count(Count::Copies, 1);
        laps.record(Stage::Copy, length, lane.stream)?;
        kernels.scatter(lane.scratch.address + to_u64(table_begin), &table, lane.stream)?;
        profile::count(Count::Launches, 1);
        laps.record(Stage::Kernel, bytes_of(copies), lane.stream)
    }

    /// Queues one copy to its destination through the copy engine.
    fn copy_rows(&self, lane: &Lane, slot: &[u8], copy: &SlotCopy) -> Result<()> {
        profile::count(Count::Copies, 1);
        let SlotCopy { slot_begin, row_bytes, rows, slot_stride, address, cast, .. } = *copy;
        let last = slot_begin + rows.saturating_sub(1) * slot_stride + row_bytes;
        let misfit = || Error::new(Kind::Internal, format!("{copy:?} cannot be copied"));
        let from = slot.get(slot_begin..last).filter(|_| cast.is_none()).ok_or_else(misfit)?;
        let from = from.as_ptr().cast::<c_void>();
        if rows == 1 {
            // SAFETY: `from` is in the slot, which does not change until the copy is done. The destination is memory
            // that the caller gave to the load.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(address, from, row_bytes, lane.stream) };
            return check("cuMemcpyHtoDAsync", result);
        }
        let memcpy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: from,
            srcDevice: 0,
            srcArray: ptr::null_mut(),
            srcPitch: slot_stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: address,
            dstArray: ptr::null_mut(),
            dstPitch: row_bytes,
            WidthInBytes: row_bytes,
            Height: rows,
        };
        // SAFETY: as above, row by row.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const memcpy, lane.stream) })
    }

    /// Queues kernels that gather contiguous pieces in the scratch memory, and returns the copy that fetches all of them.
    ///
    /// Returns `None` for few or large pieces, and without memory for the others.
    fn gather(&self, lane: &Lane, pieces: &[Fetch], laps: &mut Laps) -> Result<Option<Fetch>> {
        let length = pieces.iter().map(|piece| piece.length).sum();
        let (Some(kernels), Some(first)) = (self.planned_kernels(), pieces.first()) else { return Ok(None) };
        if !is_gathered(pieces) || to_u64(length) > lane.scratch.bytes {
            return Ok(None);
        }
        let whole = Fetch { address: lane.scratch.address, slot_begin: first.slot_begin, length };
        let mut table = Table::default();
        for piece in pieces {
            table.push(StridedCopy {
                source: piece.address,
                target: whole.address + to_u64(piece.slot_begin - whole.slot_begin),
                row_elements: to_u64(piece.length),
                rows: 1,
                source_stride_bytes: 0,
                from: Dtype::U8,
                to: Dtype::U8,
            })?;
        }
        for batch in table.batches() {
            kernels.scatter_inline(batch, lane.stream)?;
            profile::count(Count::Launches, 1);
        }
        laps.record(Stage::Kernel, length, lane.stream)?;
        Ok(Some(whole))
    }
}

/// Queues one copy to a slot.
fn fetch_piece(lane: &Lane, slot: &mut [u8], fetch: &Fetch) -> Result<()> {
    let misfit = || Error::new(Kind::Internal, format!("{fetch:?} does not fit its slot"));
    let end = fetch.slot_begin.saturating_add(fetch.length);
    let into = slot.get_mut(fetch.slot_begin..end).ok_or_else(misfit)?.as_mut_ptr().cast::<c_void>();
    profile::count(Count::Copies, 1);
    // SAFETY: `into` is in the slot, which nothing else uses until the copy is done. The caller of the save promised that
    // the device memory may be read, or it is scratch memory that only this stream uses.
    let result = unsafe { sys::cuMemcpyDtoHAsync_v2(into, fetch.address, fetch.length, lane.stream) };
    check("cuMemcpyDtoHAsync", result)
}

impl Device for Cuda {
    type CopyEvent = CopyEvent;
    type StreamEvent = Vec<Arc<Lent<Event>>>;
    const PINS: bool = true;
    const COPIES_AHEAD: usize = 2;

    fn pin(&self, memory: &mut [u8]) -> Option<Pinned> {
        let _span = profile::span(Stage::Pin).bytes(memory.len());
        // Otherwise the driver would make the pages, while it holds its lock and no other thread can start a copy.
        // SAFETY: the advice changes no byte. Where Linux does not know it, the driver makes the pages.
        unsafe { libc::madvise(memory.as_mut_ptr().cast(), memory.len(), libc::MADV_POPULATE_WRITE) };
        // SAFETY: a staging block drops the registration before the memory.
        match unsafe { Registered::new(&self.gpu.context, memory) } {
            Ok(registered) => Some(Box::new(registered)),
            Err(error) => {
                let length = memory.len();
                tracing::warn!(%error, length, "staging memory could not be pinned; copies to the GPU will be slow");
                None
            }
        }
    }

    fn warm_up(&self) -> Result<()> {
        self.current()?;
        self.kernels();
        Ok(())
    }

    fn node(&self) -> Option<Node> {
        self.gpu.node
    }

    fn place_reader(&self) {
        if let Some(cpus) = &self.gpu.reader_cpus {
            numa::move_to(cpus);
        }
    }

    fn can_cast(&self, cast: Cast) -> bool {
        has_cast(cast.from, cast.to) && self.kernels().is_some()
    }

    fn open_direct_engine<'a>(
        self: &Arc<Self>,
        sources: impl Iterator<Item = &'a Source>,
        options: &Options,
    ) -> Result<Arc<dyn Engine<Self::StreamEvent>>> {
        Ok(Arc::new(DirectEngine::open(self, sources, options)?))
    }

    fn limits(&self, slot_bytes: usize) -> DeviceLimits {
        let slot_bytes = slot_bytes.min(SCRATCH_BYTES_MAX / COPY_STREAMS);
        let limits = DeviceLimits {
            slot_bytes,
            chunk_bytes: slot_bytes,
            copies_max: usize::MAX,
            workers_per_slot: experiments::value(Switch::WorkersPerSlot).unwrap_or(WORKERS_PER_SLOT),
            reduced_bytes_min: Some(CHUNK_BYTES_MIN),
            reads_in_place: false,
        };
        // The kernels are not loaded yet. Where the driver refuses them, the room for the table stays empty.
        if IMAGE.is_none() {
            return limits;
        }
        let table_bytes = (slot_bytes / TABLE_DIVISOR).max(TASK_BYTES);
        let chunk_bytes = slot_bytes - table_bytes;
        DeviceLimits {
            chunk_bytes: chunk_bytes - chunk_bytes % TABLE_ALIGNMENT,
            copies_max: table_bytes / TASK_BYTES,
            ..limits
        }
    }

    fn chunk_needs(&self, bytes: usize, copies: &[SlotCopy]) -> ChunkNeeds {
        if !is_scattered(copies) || self.kernels().is_none() {
            return ChunkNeeds { slot_bytes: bytes, scratch_bytes: 0 };
        }
        // No copy has so many rows that it needs several tasks.
        let slot_bytes = bytes.next_multiple_of(TABLE_ALIGNMENT) + copies.len() * TASK_BYTES;
        ChunkNeeds { slot_bytes, scratch_bytes: COPY_STREAMS * slot_bytes.next_multiple_of(SCRATCH_ALIGNMENT) }
    }

    fn gather_bytes(&self, slot_bytes: usize, count: usize) -> usize {
        let is_useful = count > COPIES_MAX && self.kernels().is_some();
        if is_useful { COPY_STREAMS * slot_bytes.next_multiple_of(SCRATCH_ALIGNMENT) } else { 0 }
    }

    unsafe fn host_slice<'a>(&self, _: u64, _: usize) -> Option<&'a mut [u8]> {
        None
    }

    fn set_stream(&self, stream: u64) -> Result<()> {
        let stream = self.gpu.context.stream_of_caller(stream)?;
        self.current.store(stream, Ordering::Relaxed);
        Ok(())
    }

    fn record_caller(&self) -> Result<Self::StreamEvent> {
        Ok(vec![self.record(self.current()?)?])
    }

    fn begin(&self, after: Option<&Self::StreamEvent>, scratch: Scratch) -> Result<()> {
        self.is_on_caller.store(after.is_none(), Ordering::Relaxed);
        let Some(after) = after else {
            let mut lane = self.caller_lane.lock();
            (lane.stream, lane.scratch) = (self.current()?, scratch);
            return Ok(());
        };
        // A batch before this one may still use the block, so each copy stream keeps its part of the block.
        let bytes = scratch.bytes / to_u64(COPY_STREAMS);
        for (index, lane) in (0..).zip(&self.copy_lanes) {
            let mut lane = lane.lock();
            lane.scratch = Scratch { address: scratch.address + index * bytes, bytes };
            // Batches before this one did not use the stream, and this batch may use their scratch memory.
            self.wait_for(&lane.after, lane.stream)?;
            lane.after.clone_from(after);
        }
        Ok(())
    }

    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<CopyEvent> {
        let _span = profile::span(Stage::Queue).bytes(bytes);
        let has_kernel = is_scattered(copies) && self.planned_kernels().is_some();
        self.queue(has_kernel, |lane, laps| {
            if has_kernel {
                // Without enough scratch memory, the pieces are copied one by one.
                return self.scatter(lane, slot, bytes, copies, laps);
            }
            copies.iter().try_for_each(|copy| self.copy_rows(lane, slot, copy))?;
            laps.record(Stage::Copy, bytes_of(copies), lane.stream)
        })
    }

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<CopyEvent> {
        let bytes = fetches.iter().map(|fetch| fetch.length).sum();
        let _span = profile::span(Stage::Queue).bytes(bytes);
        // Between the runs of pieces that are contiguous in the slot are bytes of others.
        let runs = || fetches.chunk_by(|one, next| one.slot_begin + one.length == next.slot_begin);
        let has_kernel = self.planned_kernels().is_some() && runs().any(is_gathered);
        self.queue(has_kernel, |lane, laps| {
            for run in runs() {
                match self.gather(lane, run, laps)? {
                    Some(whole) => fetch_piece(lane, slot, &whole)?,
                    None => run.iter().try_for_each(|fetch| fetch_piece(lane, slot, fetch))?,
                }
            }
            laps.record(Stage::Copy, bytes, lane.stream)
        })
    }

    fn record_copies(&self) -> Result<Self::StreamEvent> {
        let used = self.copy_lanes.iter().map(Mutex::lock).filter(|lane| lane.is_used);
        used.map(|lane| self.record(lane.stream)).collect()
    }

    fn wait_for_copies(&self, check: Check<'_>) -> Result<()> {
        let used = self.copy_lanes.iter().map(Mutex::lock).filter(|lane| lane.is_used);
        let ends: Vec<_> = used.map(|lane| (lane.stream, self.record(lane.stream))).collect();
        let waits = ends.iter().map(|(stream, end)| match end {
            Ok(end) => end.wait(check),
            Err(_) => self.gpu.context.settle(*stream),
        });
        waits.fold(Ok(()), Result::and)
    }

    fn make_caller_wait(&self, event: &Self::StreamEvent) -> Result<()> {
        self.wait_for(event, self.current()?)
    }
}

/// Waits on the host for an event of the caller on the GPU with this ordinal. Unlike a wait through PyTorch, this leaves the
/// captures of CUDA graphs on other threads valid.
///
/// # Safety
/// `event` must be the handle of an event of the GPU's primary context.
pub unsafe fn wait_for_event(event: usize, ordinal: i32, check: Check<'_>) -> Result<()> {
    let gpu = Gpu::of(ordinal)?;
    // SAFETY: the caller's promise.
    wait_until(|| unsafe { gpu.context.is_done(ptr::with_exposed_provenance_mut(event)) }, check)
}
