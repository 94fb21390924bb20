//! Runs: the planner's input as rows of a file, in the order of the file.

use super::{Destination, Limits, SlotCopy, bytes_after};
use crate::cast::elements::Cast;
use crate::checkpoint::region::{Stride, TensorRegion};
use crate::num::to_usize;
use std::iter;

/// Largest size of an element, in bytes.
const ITEM_BYTES_MAX: u64 = 16;

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

    pub(super) fn end(&self) -> u64 {
        self.begin + (self.rows - 1) * self.stride + self.row_bytes
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

    /// Appends the parts of a run with one row, which are cut at multiples of `cells.bytes`.
    fn cut(&self, cells: Cells, parts: &mut Vec<Run>) {
        let mut done = 0;
        while done < self.row_bytes {
            let to_multiple = (self.begin + done + cells.item_bytes).next_multiple_of(cells.bytes) - self.begin;
            let end = self.row_bytes.min(to_multiple - to_multiple % cells.item_bytes);
            let (begin, address) = (self.begin + done, self.address_of(done));
            parts.push(Run { begin, row_bytes: end - done, address, ..*self });
            done = end;
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

/// Divides sorted runs into groups. Runs of different groups have no byte in common.
pub(super) fn overlapping(runs: &[Run]) -> impl Iterator<Item = &[Run]> {
    let mut rest = runs;
    iter::from_fn(move || {
        let (first, others) = rest.split_first()?;
        let mut end = first.end();
        let overlaps = |run: &&Run| {
            let overlaps = run.source == first.source && run.begin < end;
            end = if overlaps { end.max(run.end()) } else { end };
            overlaps
        };
        let (group, after) = rest.split_at(1 + others.iter().take_while(overlaps).count());
        rest = after;
        Some(group)
    })
}

/// Splits runs that overlap, and sorts again, so that one chunk has the bytes that several need.
///
/// Rows that are far apart become single rows: all columns of a row are then adjacent. Runs with different ranges that no
/// chunk has room for are cut at the same places of the file.
pub(super) fn split_shared(runs: &mut Vec<Run>, limits: &Limits) {
    if runs.is_sorted_by(|one, two| one.source != two.source || one.end() <= two.begin) {
        return;
    }
    let mut split = Vec::with_capacity(runs.len());
    for group in overlapping(runs) {
        let cells = Cells::of(group, limits);
        for run in group {
            match cells {
                _ if group.len() > 1 && run.is_far_apart(limits) => split.extend((0..run.rows).map(|row| run.row(row))),
                Some(cells) if run.rows == 1 => run.cut(cells, &mut split),
                _ => split.push(*run),
            }
        }
    }
    sort(&mut split);
    *runs = split;
}

/// Places at which overlapping runs are cut: the starts of the elements at multiples of a number of bytes.
#[derive(Clone, Copy)]
struct Cells {
    bytes: u64,
    item_bytes: u64,
}

impl Cells {
    /// Returns the places at which the runs of a group are cut, or `None` if one chunk holds them all, or if they are
    /// equal. Chunks of units are divided between these.
    fn of(group: &[Run], limits: &Limits) -> Option<Cells> {
        let first = group.first()?;
        let end = group.iter().map(Run::end).max()?;
        let are_equal = group.iter().all(|run| (run.begin, run.row_bytes) == (first.begin, first.row_bytes));
        let is_cut = !are_equal && limits.unit_bytes == 1 && end - first.begin > limits.row_bytes_max();
        // A part may be longer by an element.
        let bytes = limits.row_bytes_max().checked_sub(ITEM_BYTES_MAX).filter(|bytes| *bytes >= ITEM_BYTES_MAX)?;
        let item_bytes = group.iter().filter_map(|run| run.cast).map(|cast| cast.from.item_bytes()).max().unwrap_or(1);
        is_cut.then_some(Cells { bytes, item_bytes })
    }
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
