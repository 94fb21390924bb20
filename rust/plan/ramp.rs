//! Ramp: a short first chunk and longer ones after it, so that a device has work before a whole slot is filled.

use super::{Chunk, Limits, Read, SlotCopy};
use crate::num::{to_u64, to_usize};

/// Divides the first chunk into chunks of `first_bytes` bytes, twice as many and so on. Leaves chunks as they are whose
/// bytes are cast, are in units, or are rows with gaps.
pub(super) fn divide_first(chunks: &mut Vec<Chunk>, first_bytes: u64, limits: &Limits) {
    let mut at = to_usize(first_bytes.next_multiple_of(limits.alignment));
    let mut index = 0;
    while let Some(chunk) = chunks.get_mut(index)
        && limits.unit_bytes == 1
        && let Some(rest) = cut(chunk, at)
    {
        index += 1;
        chunks.insert(index, rest);
        at = at.saturating_mul(2);
    }
}

/// Cuts a chunk at a byte of its slot, and returns the rest. Returns `None` if the rest would be shorter, if a part would
/// have no copy, or if the chunk cannot be cut.
fn cut(chunk: &mut Chunk, at: usize) -> Option<Chunk> {
    let Chunk::Staged { source, bytes, reads, copies } = chunk else { return None };
    let is_plain = |copy: &SlotCopy| copy.rows == 1 && copy.cast.is_none();
    let has_both = copies.iter().any(|copy| copy.slot_begin < at)
        && copies.iter().any(|copy| copy.slot_begin + copy.row_bytes > at);
    if *bytes < at.saturating_mul(2) || !has_both || !copies.iter().all(is_plain) {
        return None;
    }
    let rest_reads = reads.iter().filter_map(|read| {
        let skipped = at.saturating_sub(read.slot_begin);
        let length = read.length.checked_sub(skipped).filter(|length| *length > 0)?;
        Some(Read { offset: read.offset + to_u64(skipped), slot_begin: read.slot_begin + skipped - at, length })
    });
    let rest_copies = copies.iter().filter_map(|copy| {
        let skipped = at.saturating_sub(copy.slot_begin);
        let row_bytes = copy.row_bytes.checked_sub(skipped).filter(|bytes| *bytes > 0)?;
        let (slot_begin, address) = (copy.slot_begin + skipped - at, copy.address + to_u64(skipped));
        Some(SlotCopy { slot_begin, row_bytes, slot_stride: row_bytes, address, ..*copy })
    });
    let (reads_after, copies_after) = (rest_reads.collect(), rest_copies.collect());
    let rest = Chunk::Staged { source: *source, bytes: *bytes - at, reads: reads_after, copies: copies_after };
    *bytes = at;
    reads.retain_mut(|read| {
        read.length = read.length.min(at.saturating_sub(read.slot_begin));
        read.length > 0
    });
    copies.retain_mut(|copy| {
        copy.row_bytes = copy.row_bytes.min(at.saturating_sub(copy.slot_begin));
        copy.slot_stride = copy.row_bytes;
        copy.row_bytes > 0
    });
    Some(rest)
}
