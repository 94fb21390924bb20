//! The kernel's table for the copies of a chunk, and the choice between a kernel and copies one by one.

use super::Fetch;
use crate::cast::scatter::{StridedCopy, Table};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::num::to_u64;
use crate::plan::SlotCopy;

/// Copies from this size on cost little more than their bytes, so that a chunk of them needs no kernel.
const COPY_BYTES: usize = 512 << 10;
/// Up to this many copies also need no kernel: one copy and one launch cost as much.
pub(super) const COPIES_MAX: usize = 2;

/// Returns the kernel's table for the copies of a chunk that begins at `address` on the device.
pub(super) fn table_of(copies: &[SlotCopy], address: u64) -> Result<Table> {
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

/// Returns whether a chunk goes up whole and is scattered by a kernel, if there are kernels.
pub(super) fn is_scattered(copies: &[SlotCopy]) -> bool {
    let rows = copies.iter().map(|copy| copy.rows).sum();
    copies.iter().any(|copy| copy.cast.is_some()) || needs_kernel(rows, bytes_of(copies))
}

/// Returns whether contiguous pieces are fetched with one copy, if there are kernels and scratch memory.
pub(super) fn is_gathered(pieces: &[Fetch]) -> bool {
    needs_kernel(pieces.len(), pieces.iter().map(|piece| piece.length).sum())
}

/// Returns whether a kernel moves this number of pieces faster than as many copies.
fn needs_kernel(pieces: usize, bytes: usize) -> bool {
    pieces > COPIES_MAX && bytes < pieces * COPY_BYTES
}

pub(super) fn bytes_of(copies: &[SlotCopy]) -> usize {
    copies.iter().map(SlotCopy::bytes).sum()
}
