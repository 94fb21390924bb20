//! Slots that several workers fill, each a part.
//!
//! Eight workers fill a slot in an eighth of the time, so that a load needs fewer slots, and its first copy starts earlier.

use super::{PAGE_BYTES, Slot, Staging};
use crate::device::Device;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::mutex::Mutex;
use crate::plan::{Read, SlotCopy};
use std::mem;
use std::ops::Range;
use std::slice;

/// Smallest part of a chunk, in bytes. A thread copies it in about 20 us, and takes some microseconds to wake up.
const PART_BYTES_MIN: usize = 64 << 10;

/// Slot of a chunk that is filled in parts, in any order, by any threads.
pub struct SharedSlot {
    state: Mutex<State>,
    memory: *mut u8,
    chunk_bytes: usize,
    part_bytes: usize,
}

struct State {
    /// `None` once all parts are filled, or after a failure.
    slot: Option<Slot>,
    /// Whether each part was taken.
    is_taken: Vec<bool>,
    /// Number of parts that were taken and are not filled yet.
    filling: usize,
    /// Number of parts that are not filled yet.
    unfilled: usize,
    has_failed: bool,
}

// SAFETY: the memory belongs to the slot, which may be sent, and one thread uses each part of it.
unsafe impl Send for SharedSlot {}
// SAFETY: as above.
unsafe impl Sync for SharedSlot {}

impl SharedSlot {
    /// Returns whether a chunk has several parts for this number of workers.
    pub fn has_parts(chunk_bytes: usize, workers: usize) -> bool {
        part_bytes(chunk_bytes, workers) < chunk_bytes
    }

    /// Divides a slot with a chunk of `chunk_bytes` bytes for this number of workers.
    pub fn new(mut slot: Slot, chunk_bytes: usize, workers: usize) -> Self {
        let chunk_bytes = chunk_bytes.min(slot.bytes_mut().len());
        let memory = slot.bytes_mut().as_mut_ptr();
        let part_bytes = part_bytes(chunk_bytes, workers);
        let count = chunk_bytes.div_ceil(part_bytes);
        let is_taken = vec![false; count];
        let state = State { slot: Some(slot), is_taken, filling: 0, unfilled: count, has_failed: false };
        SharedSlot { state: Mutex::new(state), memory, chunk_bytes, part_bytes }
    }

    /// Takes a part, and returns its range in the slot, or `None` if there is no such part or another one has failed.
    fn take(&self, part: usize) -> Result<Option<Range<usize>>> {
        let mut state = self.state.lock();
        let has_failed = state.has_failed;
        let Some(is_taken) = state.is_taken.get_mut(part).filter(|_| !has_failed) else { return Ok(None) };
        if mem::replace(is_taken, true) {
            return Err(Error::new(Kind::Internal, format!("part {part} of a slot is taken twice")));
        }
        state.filling += 1;
        let begin = part * self.part_bytes;
        Ok(Some(begin..self.chunk_bytes.min(begin + self.part_bytes)))
    }

    /// Ends the filling of a part. Returns the slot, and whether a part has failed, if no other part will be filled.
    fn end(&self, has_failed: bool) -> Option<(Slot, bool)> {
        let mut state = self.state.lock();
        state.filling -= 1;
        state.unfilled -= 1;
        state.has_failed |= has_failed;
        let is_over = state.filling == 0 && (state.has_failed || state.unfilled == 0);
        let slot = if is_over { state.slot.take() } else { None };
        slot.map(|slot| (slot, state.has_failed))
    }
}

impl<D: Device> Staging<D> {
    /// Fills a part of a shared slot with `fill`, which gets the reads of this part and its memory. After the last
    /// part, starts the copies from the slot as [`Staging::submit`] does. Returns whether it did. A part that does not
    /// exist is empty. Fails with the error of `fill`, or the device's. The slot is free once no other worker fills a
    /// part of it.
    pub fn fill_part(
        &self,
        shared: &SharedSlot,
        part: usize,
        reads: &[Read],
        copies: &[SlotCopy],
        fill: impl FnOnce(&[Read], &mut [u8]) -> Result<()>,
    ) -> Result<bool> {
        let Some(range) = shared.take(part)? else { return Ok(false) };
        let reads = reads_in(reads, &range);
        // SAFETY: the range is inside the slot, which stays in the shared slot until `end`. Parts do not overlap, and only
        // this call has taken this one.
        let bytes = unsafe { slice::from_raw_parts_mut(shared.memory.add(range.start), range.len()) };
        let filled = fill(&reads, bytes);
        match shared.end(filled.is_err()) {
            Some((slot, false)) => self.submit(slot, shared.chunk_bytes, copies).map(|()| true),
            Some((slot, true)) => {
                self.release(slot);
                filled.map(|()| false)
            }
            None => filled.map(|()| false),
        }
    }
}

/// Returns the size of the parts of a chunk, of which the last one may be smaller: whole pages, as direct reads need them.
fn part_bytes(chunk_bytes: usize, workers: usize) -> usize {
    chunk_bytes.div_ceil(workers.max(1)).next_multiple_of(PAGE_BYTES).max(PART_BYTES_MIN)
}

/// Returns the parts of reads in a range of their slot, with positions in this range.
fn reads_in(reads: &[Read], range: &Range<usize>) -> Vec<Read> {
    let first = reads.partition_point(|read| read.slot_begin + read.length <= range.start);
    let inside = reads.iter().skip(first).take_while(|read| read.slot_begin < range.end);
    let part = |read: &Read| {
        let skipped = range.start.saturating_sub(read.slot_begin);
        let (begin, end) = (read.slot_begin + skipped, range.end.min(read.slot_begin + read.length));
        Read { offset: read.offset + to_u64(skipped), slot_begin: begin - range.start, length: end - begin }
    };
    inside.map(part).collect()
}
