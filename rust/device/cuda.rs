//! An NVIDIA GPU, through the driver that is opened at run time. Only this
//! file and its folder name cudarc.
//!
//! Copies run on streams of our own, so that they overlap with whatever the
//! caller does, and events order them with the caller's current stream:
//! the copies come after what was queued before (the allocator may have handed
//! out a block whose last use is still queued), and what is queued afterwards
//! comes after the copies.
//!
//! A chunk of few large placements goes by the copy engine straight to where
//! it belongs. One of many small, strided or cast placements goes up in one
//! copy, together with a table that says where its bytes belong, and one
//! kernel puts them there:
//!
//! ```text
//! lane 0   | copy chunk 0 | kernel |  copy chunk 2  | kernel |
//! lane 1         waits    | copy chunk 1 | kernel |  copy chunk 3 ...
//! ```

pub mod convert;
mod cufile;
pub mod driver;
mod gds;
pub mod kernels;
mod timing;

use super::{ChunkLimits, ChunkNeeds, Device, DirectEngine, Fetch, Pinned, Scratch};
use crate::convert::cast::Cast;
use crate::convert::scatter::{StridedCopy, TASK_BYTES, Table, has_cast};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::plan::SlotCopy;
use crate::profile::{self, Count, Stage};
use crate::source::Source;
use cudarc::driver::sys;
use driver::{Context, Event, Registered, Stream, check};
use gds::Gds;
use kernels::Kernels;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use timing::{Laps, Timer};

/// Two, so that the kernel of one chunk runs while the copy engine takes the next.
const COPY_STREAMS: usize = 2;
/// Behind the chunk, a slot keeps this part of its bytes for the table.
const TABLE_SHARE: usize = 16;
/// Where in a slot the table may begin.
const TABLE_ALIGNMENT: usize = 16;
/// From this size on a copy costs little more than its bytes, and a chunk of such copies needs no kernel.
const COPY_BYTES: usize = 512 << 10;
/// Nor does a chunk of so few copies, since one copy and a launch cost as much.
const COPIES_MAX: usize = 2;
/// What a caller's scratch may take at most, whatever the size of a chunk.
pub const SCRATCH_BYTES_MAX: usize = 64 << 20;

/// A GPU and the stream of the caller for which tensors are loaded.
pub struct Cuda {
    events: Mutex<Vec<Event>>,
    copy_streams: [Mutex<CopyStream>; COPY_STREAMS],
    next_copy_stream: AtomicUsize,
    kernels: Option<Arc<Kernels>>,
    timer: Option<Timer>,
    /// The native handle of the caller's current stream.
    current: AtomicU64,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Cuda {}
// SAFETY: as above, and the driver serialises calls on one handle.
unsafe impl Sync for Cuda {}

/// A stream, and device memory that only its work uses. Its holder alone queues work, so that nothing comes between
/// a copy and its kernel.
struct CopyStream {
    index: usize,
    stream: Stream,
    scratch: Scratch,
}

/// A copy that runs.
pub struct CopyEvent {
    event: Event,
    laps: Laps,
}

impl Cuda {
    /// The GPU with this ordinal. `current` is the native handle of the caller's current stream on it.
    ///
    /// # Errors
    /// `device` where there is no driver or no such GPU, `invalid-argument` where the stream is being captured.
    pub fn open(ordinal: i32, current: u64) -> Result<Cuda> {
        let context = Context::retain(ordinal)?;
        refuse_capture(&context, handle_of(current)?)?;
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
        handle_of(self.current.load(Ordering::Relaxed))
    }

    /// Events are reused, since a load needs as many as it has slots and there are many more chunks.
    fn event(&self) -> Result<Event> {
        let spare = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| Event::create(&self.context), Ok)
    }

    fn keep(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// All that is queued on a stream.
    fn record(&self, stream: sys::CUstream) -> Result<Event> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        // SAFETY: event and stream belong to the context, which is current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, stream) })?;
        Ok(event)
    }

    /// Makes what is queued on a stream from now on wait for events.
    fn wait_for(&self, events: &[Event], stream: sys::CUstream) -> Result<()> {
        let _bound = self.context.bind()?;
        events.iter().try_for_each(|event| {
            // SAFETY: events and stream belong to the context, which is current.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event.handle, 0) })
        })
    }

    /// Whether a chunk goes up whole and is spread by a kernel.
    fn is_scattered(&self, copies: &[SlotCopy]) -> bool {
        let rows: usize = copies.iter().map(|copy| copy.rows).sum();
        let bytes = bytes_of(copies);
        let is_cast = copies.iter().any(|copy| copy.cast.is_some());
        self.kernels.is_some() && (is_cast || rows > COPIES_MAX && bytes < rows * COPY_BYTES)
    }

    /// Queues work that uses a slot on the next lane. If it fails, none of it runs any more.
    fn queue(&self, work: impl FnOnce(&CopyStream, &mut Laps) -> Result<()>) -> Result<CopyEvent> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        let copy_stream = self.copy_streams.get(self.next_copy_stream.fetch_add(1, Ordering::Relaxed) % COPY_STREAMS);
        let copy_stream = lock(copy_stream.ok_or_else(|| Error::new(Kind::Internal, "there is no such lane"))?);
        let timer = self.timer.as_ref();
        let mut laps =
            timer.map(|timer| timer.laps(copy_stream.index, &copy_stream.stream)).transpose()?.unwrap_or_default();
        match work(&copy_stream, &mut laps).and_then(|()| event.record(&copy_stream.stream)) {
            Ok(()) => Ok(CopyEvent { event, laps }),
            Err(error) => {
                // The copies that were queued before the one that failed still use the slot.
                copy_stream.stream.settle();
                Err(error)
            }
        }
    }

    /// One copy of the chunk and its table into the lane's scratch, and one kernel.
    fn scatter(
        &self,
        copy_stream: &CopyStream,
        slot: &mut [u8],
        bytes: usize,
        copies: &[SlotCopy],
        laps: &mut Laps,
    ) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("{} placements do not fit their slot", copies.len()));
        let kernels = self.kernels.as_ref().ok_or_else(misfit)?;
        let table = table_of(copies, copy_stream.scratch.address)?;
        let table_begin = bytes.next_multiple_of(TABLE_ALIGNMENT);
        let length = table_begin + table.bytes();
        table.write_to(slot.get_mut(table_begin..length).ok_or_else(misfit)?)?;
        if u64::try_from(length).is_ok_and(|length| length > copy_stream.scratch.bytes) {
            return Err(misfit());
        }
        let from = slot.as_ptr().cast::<c_void>();
        // SAFETY: the slot stays as it is until the copy has ended, and the scratch is memory that the caller lent
        // to the load, which only this stream uses.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(copy_stream.scratch.address, from, length, copy_stream.stream.handle) };
        check("cuMemcpyHtoDAsync", result)?;
        profile::count(Count::Copies, 1);
        laps.record(Stage::Copy, length, &copy_stream.stream)?;
        kernels.scatter(copy_stream.scratch.address + as_u64(table_begin), &table, &copy_stream.stream)?;
        profile::count(Count::Launches, 1);
        laps.record(Stage::Kernel, bytes_of(copies), &copy_stream.stream)
    }

    /// A copy for every placement.
    fn place(&self, copy_stream: &CopyStream, slot: &[u8], copy: &SlotCopy) -> Result<()> {
        profile::count(Count::Copies, 1);
        let SlotCopy { slot_begin, row_bytes, rows, slot_stride, address, cast, .. } = *copy;
        let last = slot_begin + rows.saturating_sub(1) * slot_stride + row_bytes;
        let misfit = || Error::new(Kind::Internal, format!("{copy:?} cannot be copied"));
        let from = slot.get(slot_begin..last).filter(|_| cast.is_none()).ok_or_else(misfit)?;
        let from = from.as_ptr().cast::<c_void>();
        if rows == 1 {
            // SAFETY: `from` lies in the slot, which stays as it is until the copy has ended, and the
            // destination is memory that the caller gave to the load.
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
        // SAFETY: staging lets go of the registration before it lets go of the memory.
        match unsafe { Registered::new(&self.context, memory) } {
            Ok(registered) => Some(Box::new(registered)),
            Err(error) => {
                let length = memory.len();
                tracing::warn!(%error, length, "staging could not be pinned; copies to the GPU will be slow");
                None
            }
        }
    }

    fn pci_id(&self) -> Option<String> {
        self.context.pci_id().inspect_err(|error| tracing::debug!(%error, "the GPU does not say where it is")).ok()
    }

    fn is_host(&self) -> bool {
        false
    }

    fn can_cast(&self, cast: Cast) -> bool {
        self.kernels.is_some() && has_cast(cast.from, cast.to)
    }

    fn direct_engine<'a>(
        self: &Arc<Self>,
        sources: impl Iterator<Item = &'a Arc<Source>>,
        options: &Options,
    ) -> Result<Arc<dyn DirectEngine>> {
        Ok(Arc::new(Gds::open(self, sources, options)?))
    }

    fn chunk_limits(&self, slot_bytes: usize) -> ChunkLimits {
        let slot_bytes = slot_bytes.min(SCRATCH_BYTES_MAX / COPY_STREAMS);
        if self.kernels.is_none() {
            return ChunkLimits { slot_bytes, chunk_bytes: slot_bytes, copies_max: usize::MAX };
        }
        let table_bytes = (slot_bytes / TABLE_SHARE).max(TASK_BYTES);
        let chunk_bytes = slot_bytes - table_bytes;
        ChunkLimits {
            slot_bytes,
            chunk_bytes: chunk_bytes - chunk_bytes % TABLE_ALIGNMENT,
            copies_max: table_bytes / TASK_BYTES,
        }
    }

    fn chunk_needs(&self, bytes: usize, copies: &[SlotCopy]) -> ChunkNeeds {
        if !self.is_scattered(copies) {
            return ChunkNeeds { slot_bytes: bytes, scratch_bytes: 0 };
        }
        // No placement has so many rows that it needs several tasks.
        let slot_bytes = bytes.next_multiple_of(TABLE_ALIGNMENT) + copies.len() * TASK_BYTES;
        // A lane's part begins where the copy engine likes it.
        ChunkNeeds { slot_bytes, scratch_bytes: COPY_STREAMS * slot_bytes.next_multiple_of(SCRATCH_ALIGNMENT) }
    }

    fn set_stream(&self, stream: u64) -> Result<()> {
        refuse_capture(&self.context, handle_of(stream)?)?;
        self.current.store(stream, Ordering::Relaxed);
        Ok(())
    }

    fn record_caller(&self) -> Result<Vec<Event>> {
        Ok(vec![self.record(self.current()?)?])
    }

    fn synchronize(&self, event: &Vec<Event>) -> Result<()> {
        event.iter().try_for_each(Event::wait)
    }

    fn begin(&self, after: &Vec<Event>, scratch: Scratch) -> Result<()> {
        let copy_stream_bytes = scratch.bytes / as_u64(COPY_STREAMS);
        for (index, copy_stream) in (0..).zip(&self.copy_streams) {
            let mut copy_stream = lock(copy_stream);
            copy_stream.scratch =
                Scratch { address: scratch.address + index * copy_stream_bytes, bytes: copy_stream_bytes };
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
            copies.iter().try_for_each(|copy| self.place(copy_stream, slot, copy))?;
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
                // SAFETY: `into` lies in the slot, which is the copy's until it has ended, and whoever saves has
                // promised that the memory of the device may be read.
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
        // An error is told by whoever waits for the copy.
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

    fn make_caller_wait(&self, behind: &Vec<Event>) -> Result<()> {
        self.wait_for(behind, self.current()?)
    }
}

/// Lanes' parts of the scratch begin at multiples of this.
const SCRATCH_ALIGNMENT: usize = 512;

/// The table for a chunk that begins at `address` on the device.
fn table_of(copies: &[SlotCopy], address: u64) -> Result<Table> {
    let mut table = Table::default();
    for copy in copies {
        // What is not cast is copied as bytes.
        let (from, to) = copy.cast.map_or((Dtype::U8, Dtype::U8), |cast| (cast.from, cast.to));
        table.push(StridedCopy {
            source: address + as_u64(copy.slot_begin),
            target: copy.address,
            row_elements: as_u64(copy.row_bytes) / from.item_bytes(),
            rows: as_u64(copy.rows),
            source_stride_bytes: as_u64(copy.slot_stride),
            from,
            to,
        })?;
    }
    Ok(table)
}

fn bytes_of(copies: &[SlotCopy]) -> usize {
    copies.iter().map(SlotCopy::bytes).sum()
}

/// A stream's native handle as the driver has it.
fn handle_of(stream: u64) -> Result<sys::CUstream> {
    let wrong = |_| Error::new(Kind::Internal, format!("{stream:#x} is not the handle of a stream"));
    Ok(ptr::with_exposed_provenance_mut(usize::try_from(stream).map_err(wrong)?))
}

fn lock(copy_stream: &Mutex<CopyStream>) -> MutexGuard<'_, CopyStream> {
    copy_stream.lock().unwrap_or_else(PoisonError::into_inner)
}

fn as_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// A graph would replay the copies, but not the reads, out of slots that hold the bytes of other loads by then.
fn refuse_capture(context: &Context, stream: sys::CUstream) -> Result<()> {
    let _bound = context.bind()?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: writes the status of a stream of the context, which is current.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) })?;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(());
    }
    Err(Error::new(
        Kind::InvalidArgument,
        "the current stream is being captured into a CUDA graph, which cannot read or write files; load before the \
         capture, and save after it",
    ))
}
