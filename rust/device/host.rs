//! The CPU's own memory: copies end before they return.

use super::{ChunkLimits, ChunkNeeds, Device, DirectEngine, Fetch, Pinned, Scratch};
use crate::convert::cast::Cast;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::plan::SlotCopy;
use crate::profile::{self, Stage};
use crate::source::Source;
use std::sync::Arc;

/// What one core reads it copies or casts at once, out of its own cache if it is not more than this.
const SLOT_BYTES_MAX: usize = 1 << 20;

/// Memory of this process.
#[derive(Debug, Default)]
pub struct Host;

impl Device for Host {
    type CopyEvent = ();
    type StreamEvent = ();

    fn pin(&self, _: &mut [u8]) -> Option<Pinned> {
        None
    }

    fn pci_id(&self) -> Option<String> {
        None
    }

    fn is_host(&self) -> bool {
        true
    }

    fn can_cast(&self, _: Cast) -> bool {
        true
    }

    fn direct_engine<'a>(
        self: &Arc<Self>,
        _: impl Iterator<Item = &'a Arc<Source>>,
        _: &Options,
    ) -> Result<Arc<dyn DirectEngine>> {
        Err(Error::new(Kind::Device, "gds fills the memory of GPUs alone"))
    }

    fn chunk_limits(&self, slot_bytes: usize) -> ChunkLimits {
        let slot_bytes = slot_bytes.min(SLOT_BYTES_MAX);
        ChunkLimits { slot_bytes, chunk_bytes: slot_bytes, copies_max: usize::MAX }
    }

    fn chunk_needs(&self, bytes: usize, _: &[SlotCopy]) -> ChunkNeeds {
        ChunkNeeds { slot_bytes: bytes, scratch_bytes: 0 }
    }

    fn set_stream(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn record_caller(&self) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn begin(&self, (): &(), _: Scratch) -> Result<()> {
        Ok(())
    }

    fn copy(&self, slot: &mut [u8], bytes: usize, copies: &[SlotCopy]) -> Result<()> {
        let chunk = slot.get(..bytes).unwrap_or_default();
        let is_cast = copies.iter().any(|copy| copy.cast.is_some());
        let placed_bytes: usize = copies.iter().map(SlotCopy::bytes).sum();
        let _span = profile::span(if is_cast { Stage::Cast } else { Stage::Place }).bytes(placed_bytes);
        for copy in copies {
            let row_bytes = copy.target_row_bytes();
            // SAFETY: the plan's addresses are the caller's, who gave this memory to the load.
            let target = unsafe { slice_at(copy.address, row_bytes.saturating_mul(copy.rows)) };
            let outside = || Error::new(Kind::Internal, format!("{copy:?} does not fit its slot"));
            let rows = chunk.get(copy.slot_begin..).ok_or_else(outside)?;
            let stride = copy.slot_stride;
            let is_placed = match (copy.cast, copy.row_bytes) {
                // Single elements, as a step in the innermost dimension gives them.
                (None, 1) => place_items::<1>(rows, stride, target),
                (None, 2) => place_items::<2>(rows, stride, target),
                (None, 4) => place_items::<4>(rows, stride, target),
                (None, 8) => place_items::<8>(rows, stride, target),
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
            if !is_placed {
                return Err(outside());
            }
        }
        Ok(())
    }

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()> {
        let _span = profile::span(Stage::Gather).bytes(fetches.iter().map(|fetch| fetch.length).sum::<usize>());
        for fetch in fetches {
            let outside = || Error::new(Kind::Internal, format!("{fetch:?} does not fit its slot"));
            let end = fetch.slot_begin.saturating_add(fetch.length);
            let into = slot.get_mut(fetch.slot_begin..end).ok_or_else(outside)?;
            // SAFETY: whoever saves has promised that this memory may be read.
            into.copy_from_slice(unsafe { bytes_at(fetch.address, fetch.length) });
        }
        Ok(())
    }

    fn is_done(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, (): ()) -> Result<()> {
        Ok(())
    }

    fn record_copies(&self) -> Result<()> {
        Ok(())
    }

    fn make_caller_wait(&self, (): &()) -> Result<()> {
        Ok(())
    }
}

/// Packs items that lie `stride` bytes apart; false where they are fewer than the target holds.
fn place_items<const BYTES: usize>(rows: &[u8], stride: usize, target: &mut [u8]) -> bool {
    let items = rows.chunks(stride.max(BYTES)).filter_map(<[u8]>::first_chunk::<BYTES>);
    let (targets, _) = target.as_chunks_mut::<BYTES>();
    let count = targets.len();
    targets.iter_mut().zip(items).map(|(into, from)| *into = *from).count() == count
}

/// The memory of this process at an address that crossed the border as a number.
///
/// # Safety
/// `length` bytes from `address` on must be memory that nobody else uses while the slice lives.
pub unsafe fn slice_at<'a>(address: u64, length: usize) -> &'a mut [u8] {
    let address = usize::try_from(address).unwrap_or(0);
    // SAFETY: the caller's promise; addresses of this process fit a `usize`.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), length) }
}

/// As [`slice_at`], only to be read.
///
/// # Safety
/// `length` bytes from `address` on must be memory that nobody writes to while the slice lives.
pub unsafe fn bytes_at<'a>(address: u64, length: usize) -> &'a [u8] {
    let address = usize::try_from(address).unwrap_or(0);
    // SAFETY: the caller's promise; addresses of this process fit a `usize`.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), length) }
}
