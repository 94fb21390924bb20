//! Runs: the planner's input as rows of a file, in the order of the file.

use super::{Destination, Limits, SlotCopy, bytes_after};
use crate::checkpoint::region::{Stride, TensorRegion};
use crate::convert::cast::Cast;
use crate::num::to_usize;

/// Equally spaced rows of a file with contiguous destinations.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) tensor: usize,
    pub(super) source: usize,
    pub(super) begin: u64,
    pub(super) row_bytes: u64,
    pub(super) rows: u64,
    pub(super) stride: u64,
    pub(super) address: u64,
    pub(super) cast: Option<Cast>,
}

impl Run {
    /// Returns the destination of the byte at offset `bytes` of the run's contiguous form.
    fn address_of(&self, bytes: u64) -> u64 {
        self.address + bytes_after(self.cast, bytes)
    }

    fn end(&self) -> u64 {
        self.begin + (self.rows - 1) * self.stride + self.row_bytes
    }

    fn begins_before_end_of(&self, other: &Run) -> bool {
        self.source == other.source && self.begin < other.end()
    }

    /// Returns whether each row needs a read of its own.
    pub(super) fn is_far_apart(&self, limits: &Limits) -> bool {
        self.rows > 1 && !limits.are_near(self.row_bytes, self.stride)
    }

    pub(super) fn slot_copy(&self, slot_begin: u64, row: u64, rows: u64, slot_stride: u64) -> SlotCopy {
        SlotCopy {
            tensor: self.tensor,
            slot_begin: to_usize(slot_begin),
            row_bytes: to_usize(self.row_bytes),
            rows: to_usize(rows),
            slot_stride: to_usize(slot_stride),
            address: self.address_of(row * self.row_bytes),
            cast: self.cast,
        }
    }

    fn row(&self, row: u64) -> Run {
        let address = self.address_of(row * self.row_bytes);
        Run { begin: self.begin + row * self.stride, rows: 1, address, ..*self }
    }
}

/// Sorts runs by file and offset, the order in which disks are fastest.
pub(super) fn sort(runs: &mut [Run]) {
    if !runs.is_sorted_by_key(|run| (run.source, run.begin)) {
        runs.sort_by_key(|run| (run.source, run.begin));
    }
}

/// Returns sorted runs, each with whether its range overlaps another run's.
pub(super) fn with_sharing(runs: &[Run]) -> impl Iterator<Item = (&Run, bool)> {
    let mut reached = (0, 0);
    runs.iter().enumerate().map(move |(index, run)| {
        let next = runs.get(index.saturating_add(1));
        let is_shared = (run.source, run.begin) < reached || next.is_some_and(|next| next.begins_before_end_of(run));
        reached = reached.max((run.source, run.end()));
        (run, is_shared)
    })
}

/// Splits overlapping runs whose rows are far apart into single rows, and sorts again. All columns of a row are then
/// adjacent, so that one read covers them.
pub(super) fn split_shared_rows(runs: &mut Vec<Run>, limits: &Limits) {
    let is_split = |run: &Run, is_shared: bool| is_shared && run.is_far_apart(limits);
    if !with_sharing(runs).any(|(run, is_shared)| is_split(run, is_shared)) {
        return;
    }
    let mut rows = Vec::with_capacity(runs.len());
    for (run, is_shared) in with_sharing(runs) {
        if is_split(run, is_shared) {
            rows.extend((0..run.rows).map(|row| run.row(row)));
        } else {
            rows.push(*run);
        }
    }
    sort(&mut rows);
    *runs = rows;
}

/// Appends the runs of a destination.
///
/// A destination may begin and end in the middle of rows. A row longer than a chunk is split at fixed positions, so
/// that regions with the same bytes share chunks.
pub(super) fn push_runs(region: &TensorRegion, destination: &Destination, limits: &Limits, runs: &mut Vec<Run>) {
    let range = &region.range;
    let Destination { tensor, address, cast, .. } = *destination;
    // A run covers the innermost stride only.
    let innermost = range.strides.last().copied().unwrap_or(Stride { count: 1, bytes: range.row_bytes });
    let stride = innermost.bytes;
    let mut at = destination.begin;
    while at < destination.end {
        let (row, column) = (at / range.row_bytes, at % range.row_bytes);
        let offset = range.row_begin(row) + column;
        let part_bytes = limits.part_bytes(offset, region.tensor_begin, region.dtype.item_bytes());
        let left = destination.end - at;
        let rows_left = (left / range.row_bytes).min(innermost.count - row % innermost.count);
        let whole_rows = if column == 0 { rows_left } else { 0 };
        let (row_bytes, rows) = match whole_rows {
            0 => (left.min(range.row_bytes - column).min(part_bytes), 1),
            _ if range.row_bytes > limits.row_bytes_max() => (range.row_bytes.min(part_bytes), 1),
            rows => (range.row_bytes, rows.min(limits.rows_in_cell(offset, range.row_bytes, stride))),
        };
        let whole = Run { tensor, source: region.source, begin: offset, row_bytes, rows, stride, address, cast };
        runs.push(Run { address: whole.address_of(at - destination.begin), ..whole });
        at += row_bytes * rows;
    }
}
