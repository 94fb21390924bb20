//! Host memory as a device. Copies are done when they return.

use super::engine::Engine;
use super::{ChunkNeeds, CopyInFlight, Device, DeviceLimits, Fetch, Pinned, Scratch};
use crate::cast::elements::Cast;
use crate::cast::streaming_copy::{self, LINE_BYTES};
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::options::Options;
use crate::os::memory;
use crate::os::numa::Node;
use crate::os::retry::Check;
use crate::plan::SlotCopy;
use crate::profile::{self, Stage};
use crate::source::Source;
use std::sync::Arc;

/// Upper bound for the slot size, in bytes. A core copies or casts what it has just read out of its own cache, and the disk
/// writes to a huge page.
const SLOT_BYTES_MAX: usize = 2 << 20;

/// Smallest copy of rows that bypasses the caches, in bytes. Shorter ones are of small tensors, which a program may use next.
const STREAMED_BYTES_MIN: usize = 64 << 10;

/// Shortest row that bypasses the caches, in bytes.
const STREAMED_ROW_BYTES_MIN: usize = 256;

/// Memory of this process.
#[derive(Debug, Default)]
pub struct Host;

impl CopyInFlight for () {
    fn is_done(&self) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _: Check<'_>) -> Result<()> {
        Ok(())
    }
}

impl Device for Host {
    type CopyEvent = ();
    type StreamEvent = ();
    const PINS: bool = false;
    const COPIES_AHEAD: usize = 0;

    fn warm_up(&self) -> Result<()> {
        Ok(())
    }

    fn pin(&self, _: &mut [u8]) -> Option<Pinned> {
        None
    }

    fn node(&self) -> Option<Node> {
        None
    }

    fn can_cast(&self, _: Cast) -> bool {
        true
    }

    fn open_direct_engine<'a>(
        self: &Arc<Self>,
        _: impl Iterator<Item = &'a Source>,
        _: &Options,
    ) -> Result<Arc<dyn Engine<()>>> {
        Err(Error::new(Kind::Device, "GPUDirect Storage reads only into GPU memory"))
    }

    fn local_slot_bytes(&self, chunk_bytes: usize) -> usize {
        chunk_bytes.min(SLOT_BYTES_MAX)
    }

    fn limits(&self, slot_bytes: usize) -> DeviceLimits {
        DeviceLimits {
            slot_bytes,
            chunk_bytes: slot_bytes,
            copies_max: usize::MAX,
            workers_per_slot: 1,
            reduced_bytes_min: None,
            reads_in_place: true,
        }
    }

    fn chunk_needs(&self, bytes: usize, _: &[SlotCopy]) -> ChunkNeeds {
        ChunkNeeds { slot_bytes: bytes, scratch_bytes: 0 }
    }

    fn gather_bytes(&self, _: usize, _: usize) -> usize {
        0
    }

    unsafe fn host_slice<'a>(&self, address: u64, length: usize) -> Option<&'a mut [u8]> {
        // SAFETY: the caller's promise.
        Some(unsafe { slice_at(address, length) })
    }

    fn set_stream(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn record_caller(&self) -> Result<()> {
        Ok(())
    }

    fn begin(&self, _: Option<&()>, _: Scratch) -> Result<()> {
        Ok(())
    }

    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<()> {
        copy_rows(slot.get(..bytes).unwrap_or_default(), copies)
    }

    fn copy_borrowed(&self, bytes: &[u8], copies: &[SlotCopy]) -> Option<Result<()>> {
        Some(copy_rows(bytes, copies))
    }

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()> {
        let _span = profile::span(Stage::Gather).bytes(fetches.iter().map(|fetch| fetch.length).sum::<usize>());
        for fetch in fetches {
            let misfit = || Error::new(Kind::Internal, format!("{fetch:?} does not fit its slot"));
            let end = fetch.slot_begin.saturating_add(fetch.length);
            let into = slot.get_mut(fetch.slot_begin..end).ok_or_else(misfit)?;
            // SAFETY: the caller of the save promised that this memory may be read.
            into.copy_from_slice(unsafe { bytes_at(fetch.address, fetch.length) });
        }
        Ok(())
    }

    fn record_copies(&self) -> Result<()> {
        Ok(())
    }

    fn wait_for_copies(&self, _: Check<'_>) -> Result<()> {
        Ok(())
    }

    fn make_caller_wait(&self, (): &()) -> Result<()> {
        Ok(())
    }
}

/// Copies rows of a chunk to their destinations.
fn copy_rows(chunk: &[u8], copies: &[SlotCopy]) -> Result<()> {
    let is_cast = copies.iter().any(|copy| copy.cast.is_some());
    let copied_bytes: usize = copies.iter().map(SlotCopy::bytes).sum();
    let _span = profile::span(if is_cast { Stage::Cast } else { Stage::Place }).bytes(copied_bytes);
    for copy in copies {
        let row_bytes = copy.target_row_bytes();
        // SAFETY: the addresses of a plan are destinations, which the caller of the load gave to it.
        let target = unsafe { slice_at(copy.address, row_bytes.saturating_mul(copy.rows)) };
        memory::populate(target);
        let misfit = || Error::new(Kind::Internal, format!("{copy:?} does not fit its slot"));
        let rows = chunk.get(copy.slot_begin..).ok_or_else(misfit)?;
        let stride = copy.slot_stride;
        let is_complete = match (copy.cast, copy.row_bytes) {
            // Single elements result from a step in the innermost dimension.
            (None, 1) => pack_items::<1>(rows, stride, target),
            (None, 2) => pack_items::<2>(rows, stride, target),
            (None, 4) => pack_items::<4>(rows, stride, target),
            (None, 8) => pack_items::<8>(rows, stride, target),
            (None, _) if is_streamed(copy) => stream_rows(rows, stride, row_bytes, target),
            (cast, _) => target.chunks_exact_mut(row_bytes).enumerate().all(|(row, into)| {
                let begin = row * stride;
                rows.get(begin..begin + copy.row_bytes).is_some_and(|from| {
                    match cast {
                        None => into.copy_from_slice(from),
                        Some(cast) => cast.run(from, into),
                    }
                    true
                })
            }),
        };
        if !is_complete {
            return Err(misfit());
        }
    }
    Ok(())
}

/// Returns whether a copy bypasses the caches: its rows are whole cache lines, and there are many.
fn is_streamed(copy: &SlotCopy) -> bool {
    let is_of_lines = copy.row_bytes.is_multiple_of(LINE_BYTES) && to_usize(copy.address).is_multiple_of(LINE_BYTES);
    is_of_lines && copy.row_bytes >= STREAMED_ROW_BYTES_MIN && copy.bytes() >= STREAMED_BYTES_MIN
}

/// Packs rows that begin `stride` bytes apart. Returns false if there are fewer than the target holds.
fn stream_rows(rows: &[u8], stride: usize, row_bytes: usize, target: &mut [u8]) -> bool {
    let mut is_complete = true;
    streaming_copy::copy_all(target.chunks_exact_mut(row_bytes).enumerate().map_while(|(row, into)| {
        let begin = row * stride;
        let from = rows.get(begin..begin + row_bytes);
        is_complete &= from.is_some();
        Some((from?, into))
    }));
    is_complete
}

/// Packs items that are `stride` bytes apart. Returns false if there are fewer than the target holds.
fn pack_items<const BYTES: usize>(rows: &[u8], stride: usize, target: &mut [u8]) -> bool {
    let items = rows.chunks(stride.max(BYTES)).filter_map(<[u8]>::first_chunk::<BYTES>);
    let (targets, _) = target.as_chunks_mut::<BYTES>();
    let count = targets.len();
    targets.iter_mut().zip(items).map(|(into, from)| *into = *from).count() == count
}

/// Returns the memory of this process at an address that crossed the FFI boundary as a number.
///
/// # Safety
/// `length` bytes from `address` must be memory that nothing else uses while the slice lives.
pub unsafe fn slice_at<'a>(address: u64, length: usize) -> &'a mut [u8] {
    // SAFETY: the caller's promise. Addresses of this process fit a `usize`.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(to_usize(address)), length) }
}

/// Returns the memory of this process at an address that crossed the FFI boundary as a number, for reading.
///
/// # Safety
/// `length` bytes from `address` must be memory that nothing writes to while the slice lives.
pub unsafe fn bytes_at<'a>(address: u64, length: usize) -> &'a [u8] {
    // SAFETY: the caller's promise. Addresses of this process fit a `usize`.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(to_usize(address)), length) }
}
