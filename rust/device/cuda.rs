//! An NVIDIA GPU, through the CUDA driver, which is opened at run time. Only this file and its folder name cudarc.
//!
//! Copies run on copy streams of the device, so that they overlap with the caller's work. Events order them with the
//! caller's current stream. Copies wait for the work queued before them, because the allocator may have returned
//! memory whose last use is still queued. Work queued after them waits for the copies.
//!
//! Few large copies go through the copy engine straight to their destinations. Many small, strided or cast copies go
//! up as one: the chunk and a table of its copies are copied to scratch memory, from where one kernel scatters them:
//!
//! ```text
//! copy stream 0   | copy chunk 0 | kernel |  copy chunk 2  | kernel |
//! copy stream 1         waits    | copy chunk 1 | kernel |  copy chunk 3 ...
//! ```

pub mod convert;
mod cufile;
pub mod driver;
mod gds;
pub mod kernels;
mod timing;

use super::engine::Engine;
use super::{ChunkNeeds, Device, DeviceLimits, Fetch, Pinned, Scratch};
use crate::convert::cast::Cast;
use crate::convert::scatter::{StridedCopy, TASK_BYTES, Table, has_cast};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::os::numa::{self, Node};
use crate::plan::SlotCopy;
use crate::profile::{self, Count, Stage};
use crate::source::Source;
use cudarc::driver::sys;
use driver::{Context, Event, Registered, Stream, check, stream_handle};
use gds::DirectEngine;
use kernels::Kernels;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use timing::{Laps, Timer};

/// Number of copy streams: the kernel of one chunk runs while the copy engine copies the next.
const COPY_STREAMS: usize = 2;
/// A worker reads into one slot while the device copies from another.
const SLOTS_PER_WORKER: usize = 2;
/// The table behind a chunk takes up to 1/16 of the slot.
const TABLE_DIVISOR: usize = 16;
/// Alignment of the table in a slot, in bytes.
const TABLE_ALIGNMENT: usize = 16;
/// Copies from this size on cost little more than their bytes, so that a chunk of them needs no kernel.
const COPY_BYTES: usize = 512 << 10;
/// Up to this many copies also need no kernel: one copy and one launch cost as much.
const COPIES_MAX: usize = 2;
/// Alignment of each copy stream's part of the scratch memory, in bytes.
const SCRATCH_ALIGNMENT: usize = 512;
/// Upper bound for scratch memory, in bytes, whatever the chunk size.
pub const SCRATCH_BYTES_MAX: usize = 64 << 20;

/// A GPU, and the caller's current stream on it.
pub struct Cuda {
    events: Mutex<Vec<Event>>,
    copy_streams: [Mutex<CopyStream>; COPY_STREAMS],
    next_copy_stream: AtomicUsize,
    kernels: Option<Arc<Kernels>>,
    timer: Option<Timer>,
    /// Native handle of the caller's current stream.
    current: AtomicU64,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Cuda {}
// SAFETY: as above, and the driver serializes calls on one handle.
unsafe impl Sync for Cuda {}

/// A stream, and scratch memory that only work on this stream uses.
///
/// A thread locks it while it queues work, so that nothing comes between a copy and its kernel.
struct CopyStream {
    index: usize,
    stream: Stream,
    scratch: Scratch,
}

/// Event after the copies of one slot.
pub struct CopyEvent {
    event: Event,
    laps: Laps,
}

impl Cuda {
    /// Opens the GPU with this ordinal. `current` is the native handle of the caller's current stream on it.
    ///
    /// # Errors
    /// `device` if there is no driver or no such GPU, `invalid-argument` if the stream is being captured.
    pub fn open(ordinal: i32, current: u64) -> Result<Cuda> {
        let context = Context::retain(ordinal)?;
        context.refuse_capture(current)?;
        let copy_stream =
            |index| Ok(CopyStream { index, stream: Stream::create(&context)?, scratch: Scratch::default() });
        let (first, second) = (copy_stream(0)?, copy_stream(1)?);
        Ok(Cuda {
            events: Mutex::new(Vec::new()),
            timer: Timer::start(&context, ordinal, &first.stream)?,
            copy_streams: [Mutex::new(first), Mutex::new(second)],
            next_copy_stream: AtomicUsize::new(0),
            kernels: Kernels::of(&context)?,
            current: AtomicU64::new(current),
            context,
        })
    }

    fn current(&self) -> Result<sys::CUstream> {
        stream_handle(self.current.load(Ordering::Relaxed))
    }

    /// Returns a new or a reused event. A load needs one event per slot, and has many more chunks than slots.
    fn event(&self) -> Result<Event> {
        let spare = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| Event::create(&self.context), Ok)
    }

    /// Keeps an event for reuse.
    fn keep(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Records an event after all work queued on a stream.
    fn record(&self, stream: sys::CUstream) -> Result<Event> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        // SAFETY: event and stream belong to the context, which is current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, stream) })?;
        Ok(event)
    }

    /// Makes work queued on a stream from now on wait for events.
    fn wait_for(&self, events: &[Event], stream: sys::CUstream) -> Result<()> {
        let _bound = self.context.bind()?;
        events.iter().try_for_each(|event| {
            // SAFETY: events and stream belong to the context, which is current.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event.handle, 0) })
        })
    }

    /// Returns whether a chunk goes up whole and is scattered by a kernel.
    fn is_scattered(&self, copies: &[SlotCopy]) -> bool {
        let rows: usize = copies.iter().map(|copy| copy.rows).sum();
        let bytes = bytes_of(copies);
        let is_cast = copies.iter().any(|copy| copy.cast.is_some());
        self.kernels.is_some() && (is_cast || rows > COPIES_MAX && bytes < rows * COPY_BYTES)
    }

    /// Queues work that uses a slot on the next copy stream. If this fails, no such work is in flight.
    fn queue(&self, work: impl FnOnce(&CopyStream, &mut Laps) -> Result<()>) -> Result<CopyEvent> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        let copy_stream = self.copy_streams.get(self.next_copy_stream.fetch_add(1, Ordering::Relaxed) % COPY_STREAMS);
        let copy_stream = lock(copy_stream.ok_or_else(no_copy_stream)?);
        let timer = self.timer.as_ref();
        let mut laps =
            timer.map(|timer| timer.laps(copy_stream.index, &copy_stream.stream)).transpose()?.unwrap_or_default();
        match work(&copy_stream, &mut laps).and_then(|()| event.record(&copy_stream.stream)) {
            Ok(()) => Ok(CopyEvent { event, laps }),
            Err(error) => {
                // The copies queued before the failed one still use the slot.
                copy_stream.stream.settle();
                Err(error)
            }
        }
    }

    /// Queues one copy of the chunk and its table to the scratch memory, and one kernel.
    fn scatter(
        &self,
        copy_stream: &CopyStream,
        slot: &mut [u8],
        bytes: usize,
        copies: &[SlotCopy],
        laps: &mut Laps,
    ) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("{} copies do not fit their slot", copies.len()));
        let kernels = self.kernels.as_ref().ok_or_else(misfit)?;
        let table = table_of(copies, copy_stream.scratch.address)?;
        let table_begin = bytes.next_multiple_of(TABLE_ALIGNMENT);
        let length = table_begin + table.bytes();
        table.write_to(slot.get_mut(table_begin..length).ok_or_else(misfit)?)?;
        if to_u64(length) > copy_stream.scratch.bytes {
            return Err(misfit());
        }
        let from = slot.as_ptr().cast::<c_void>();
        // SAFETY: the slot does not change until the copy is done. The scratch memory belongs to the batch, and only
        // this stream uses this part of it.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(copy_stream.scratch.address, from, length, copy_stream.stream.handle) };
        check("cuMemcpyHtoDAsync", result)?;
        profile::count(Count::Copies, 1);
        laps.record(Stage::Copy, length, &copy_stream.stream)?;
        kernels.scatter(copy_stream.scratch.address + to_u64(table_begin), &table, &copy_stream.stream)?;
        profile::count(Count::Launches, 1);
        laps.record(Stage::Kernel, bytes_of(copies), &copy_stream.stream)
    }

    /// Queues one copy to its destination through the copy engine.
    fn copy_rows(&self, copy_stream: &CopyStream, slot: &[u8], copy: &SlotCopy) -> Result<()> {
        profile::count(Count::Copies, 1);
        let SlotCopy { slot_begin, row_bytes, rows, slot_stride, address, cast, .. } = *copy;
        let last = slot_begin + rows.saturating_sub(1) * slot_stride + row_bytes;
        let misfit = || Error::new(Kind::Internal, format!("{copy:?} cannot be copied"));
        let from = slot.get(slot_begin..last).filter(|_| cast.is_none()).ok_or_else(misfit)?;
        let from = from.as_ptr().cast::<c_void>();
        if rows == 1 {
            // SAFETY: `from` is in the slot, which does not change until the copy is done. The destination is memory
            // that the caller gave to the load.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(address, from, row_bytes, copy_stream.stream.handle) };
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
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const memcpy, copy_stream.stream.handle) })
    }
}

impl Device for Cuda {
    type CopyEvent = CopyEvent;
    type StreamEvent = Vec<Event>;

    fn pin(&self, memory: &mut [u8]) -> Option<Pinned> {
        let _span = profile::span(Stage::Pin).bytes(memory.len());
        // SAFETY: a staging block drops the registration before the memory.
        match unsafe { Registered::new(&self.context, memory) } {
            Ok(registered) => Some(Box::new(registered)),
            Err(error) => {
                let length = memory.len();
                tracing::warn!(%error, length, "staging memory could not be pinned; copies to the GPU will be slow");
                None
            }
        }
    }

    fn node(&self) -> Option<Node> {
        let id = self.context.pci_id().inspect_err(|error| tracing::debug!(%error, "the GPU has no PCI address"));
        id.ok().and_then(|id| numa::of_pci_device(&id))
    }

    fn can_cast(&self, cast: Cast) -> bool {
        self.kernels.is_some() && has_cast(cast.from, cast.to)
    }

    fn open_direct_engine<'a>(
        self: &Arc<Self>,
        sources: impl Iterator<Item = &'a Arc<Source>>,
        options: &Options,
    ) -> Result<Arc<dyn Engine<Vec<Event>>>> {
        Ok(Arc::new(DirectEngine::open(self, sources, options)?))
    }

    fn limits(&self, slot_bytes: usize) -> DeviceLimits {
        let slot_bytes = slot_bytes.min(SCRATCH_BYTES_MAX / COPY_STREAMS);
        let limits = DeviceLimits {
            slot_bytes,
            chunk_bytes: slot_bytes,
            copies_max: usize::MAX,
            slots_per_worker: SLOTS_PER_WORKER,
            reads_in_place: false,
        };
        if self.kernels.is_none() {
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
        if !self.is_scattered(copies) {
            return ChunkNeeds { slot_bytes: bytes, scratch_bytes: 0 };
        }
        // No copy has so many rows that it needs several tasks.
        let slot_bytes = bytes.next_multiple_of(TABLE_ALIGNMENT) + copies.len() * TASK_BYTES;
        ChunkNeeds { slot_bytes, scratch_bytes: COPY_STREAMS * slot_bytes.next_multiple_of(SCRATCH_ALIGNMENT) }
    }

    unsafe fn host_slice<'a>(&self, _: u64, _: usize) -> Option<&'a mut [u8]> {
        None
    }

    fn set_stream(&self, stream: u64) -> Result<()> {
        self.context.refuse_capture(stream)?;
        self.current.store(stream, Ordering::Relaxed);
        Ok(())
    }

    fn record_caller(&self) -> Result<Vec<Event>> {
        Ok(vec![self.record(self.current()?)?])
    }

    fn begin(&self, after: &Vec<Event>, scratch: Scratch) -> Result<()> {
        let bytes = scratch.bytes / to_u64(COPY_STREAMS);
        for (index, copy_stream) in (0..).zip(&self.copy_streams) {
            let mut copy_stream = lock(copy_stream);
            copy_stream.scratch = Scratch { address: scratch.address + index * bytes, bytes };
            self.wait_for(after, copy_stream.stream.handle)?;
        }
        Ok(())
    }

    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<CopyEvent> {
        let _span = profile::span(Stage::Queue).bytes(bytes);
        self.queue(|copy_stream, laps| {
            if self.is_scattered(copies) {
                return self.scatter(copy_stream, slot, bytes, copies, laps);
            }
            copies.iter().try_for_each(|copy| self.copy_rows(copy_stream, slot, copy))?;
            laps.record(Stage::Copy, bytes_of(copies), &copy_stream.stream)
        })
    }

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<CopyEvent> {
        let bytes = fetches.iter().map(|fetch| fetch.length).sum();
        let _span = profile::span(Stage::Queue).bytes(bytes);
        self.queue(|copy_stream, laps| {
            for fetch in fetches {
                let misfit = || Error::new(Kind::Internal, format!("{fetch:?} does not fit its slot"));
                let end = fetch.slot_begin.saturating_add(fetch.length);
                let into = slot.get_mut(fetch.slot_begin..end).ok_or_else(misfit)?.as_mut_ptr().cast::<c_void>();
                profile::count(Count::Copies, 1);
                // SAFETY: `into` is in the slot, which nothing else uses until the copy is done. The caller of the
                // save promised that the device memory may be read.
                let result =
                    unsafe { sys::cuMemcpyDtoHAsync_v2(into, fetch.address, fetch.length, copy_stream.stream.handle) };
                check("cuMemcpyDtoHAsync", result)?;
            }
            laps.record(Stage::Copy, bytes, &copy_stream.stream)
        })
    }

    fn is_done(&self, copy: &CopyEvent) -> Result<bool> {
        let _bound = self.context.bind()?;
        // SAFETY: the event belongs to the context, which is current.
        let result = unsafe { sys::cuEventQuery(copy.event.handle) };
        // `wait` returns the error of a failed copy.
        Ok(result != sys::CUresult::CUDA_ERROR_NOT_READY)
    }

    fn wait(&self, copy: CopyEvent) -> Result<()> {
        let span = profile::span(Stage::Wait);
        copy.event.wait()?;
        drop(span);
        self.keep(copy.event);
        self.timer.as_ref().map_or(Ok(()), |timer| timer.report(&copy.laps))
    }

    fn record_copies(&self) -> Result<Vec<Event>> {
        self.copy_streams.iter().map(|copy_stream| self.record(lock(copy_stream).stream.handle)).collect()
    }

    fn make_caller_wait(&self, event: &Vec<Event>) -> Result<()> {
        self.wait_for(event, self.current()?)
    }
}

/// Returns the kernel's table for the copies of a chunk that begins at `address` on the device.
fn table_of(copies: &[SlotCopy], address: u64) -> Result<Table> {
    let mut table = Table::default();
    for copy in copies {
        // A copy without a cast moves bytes.
        let (from, to) = copy.cast.map_or((Dtype::U8, Dtype::U8), |cast| (cast.from, cast.to));
        table.push(StridedCopy {
            source: address + to_u64(copy.slot_begin),
            target: copy.address,
            row_elements: to_u64(copy.row_bytes) / from.item_bytes(),
            rows: to_u64(copy.rows),
            source_stride_bytes: to_u64(copy.slot_stride),
            from,
            to,
        })?;
    }
    Ok(table)
}

fn bytes_of(copies: &[SlotCopy]) -> usize {
    copies.iter().map(SlotCopy::bytes).sum()
}

fn lock(copy_stream: &Mutex<CopyStream>) -> MutexGuard<'_, CopyStream> {
    copy_stream.lock().unwrap_or_else(PoisonError::into_inner)
}

fn no_copy_stream() -> Error {
    Error::new(Kind::Internal, "no copy stream has this index")
}
