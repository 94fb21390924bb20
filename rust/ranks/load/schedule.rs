//! Schedule of an exchange: tensors that ranks read together, window by window.

use super::{Route, Tensor};
use crate::num::to_u64;
use std::ops::Range;
use std::sync::OnceLock;

/// Collective that follows the reads of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// None: each rank has read for itself only.
    None,
    /// All-to-all: each rank sends each other rank the bytes that it requested.
    Exchange,
    /// All-gather: each rank sends the same bytes to all ranks.
    Gather,
}

/// Requested bytes of some tensors, in file order, divided into rounds. Every rank reads a part of each round, in one
/// window, or in several if the part would not fit the buffers: in each window of a round, each rank reads a slice of its
/// part.
#[derive(Debug, Default)]
pub(super) struct ExchangeSchedule {
    /// Indices into the tensors of the plan.
    tensors: Vec<usize>,
    /// Offset of each tensor in the schedule, and the end of the last.
    begins: Vec<u64>,
    /// Offset of each round in the schedule, and the end of the last.
    cuts: Vec<u64>,
    /// Number of windows of a round.
    slices: usize,
    /// Prefix sums of the bytes that the ranks read, from 0 to the total.
    ends: Vec<u64>,
    /// Length of the longest part of each window. Computed on first use.
    longest: Vec<OnceLock<u64>>,
}

/// Range of a tensor's file.
pub(super) struct FileRange {
    /// Index into the tensors of the plan.
    pub(super) tensor: usize,
    /// Byte range of the file.
    pub(super) range: Range<u64>,
    /// Offset in the schedule.
    pub(super) begin: u64,
}

impl ExchangeSchedule {
    /// Creates the schedule of the tensors with this route.
    pub(super) fn of(tensors: &[Tensor], route: Route) -> ExchangeSchedule {
        let mut schedule = ExchangeSchedule { begins: vec![0], ..ExchangeSchedule::default() };
        let mut end = 0;
        for (plan_index, tensor) in tensors.iter().enumerate() {
            if tensor.route == route {
                end += tensor.hull.end - tensor.hull.start;
                schedule.tensors.push(plan_index);
                schedule.begins.push(end);
            }
        }
        schedule
    }

    pub(super) fn bytes(&self) -> u64 {
        self.begins.last().copied().unwrap_or(0)
    }

    /// Returns the tensors of the schedule, in order.
    pub(super) fn tensors<'a>(&'a self, tensors: &'a [Tensor]) -> impl Iterator<Item = &'a Tensor> + 'a {
        self.tensors.iter().filter_map(|&plan_index| tensors.get(plan_index))
    }

    /// Returns the number of windows.
    pub(super) fn windows(&self) -> usize {
        self.cuts.len().saturating_sub(1) * self.slices
    }

    /// Divides the schedule into rounds at these offsets, and each round into one part for each rank, in proportion to
    /// `rank_bytes`. Each part is read in `slices` windows.
    pub(super) fn cut(&mut self, cuts: Vec<u64>, slices: usize, rank_bytes: &[u64]) {
        let add = |sum: &mut u64, bytes: &u64| {
            *sum += bytes;
            Some(*sum)
        };
        self.ends = std::iter::once(0).chain(rank_bytes.iter().scan(0, add)).collect();
        (self.cuts, self.slices) = (cuts, slices);
        self.longest = vec![OnceLock::new(); self.windows()];
    }

    /// Returns the part of a window that a rank reads.
    pub(super) fn window(&self, tensors: &[Tensor], rank: usize, window: usize) -> Range<u64> {
        let slices = self.slices.max(1);
        let part = self.part(tensors, rank, window / slices);
        let at = |slice: usize| {
            if slice == slices {
                return part.end;
            }
            let before = u128::from(part.end - part.start) * u128::from(to_u64(slice)) / u128::from(to_u64(slices));
            self.aligned(tensors, part.start + u64::try_from(before).unwrap_or(u64::MAX)).max(part.start)
        };
        at(window % slices)..at(window % slices + 1)
    }

    /// Returns the part of a round that a rank reads: whole units, if they fit. Each round begins with the part of another
    /// rank, so that in rounds of few units the ranks take turns.
    fn part(&self, tensors: &[Tensor], rank: usize, round: usize) -> Range<u64> {
        let (whole, own) = match (self.cuts.get(round..round + 2), self.ends.get(rank..rank + 2)) {
            (Some(&[begin, end]), Some(&[from, to])) => (begin..end, from..to),
            _ => return 0..0,
        };
        let total = self.ends.last().copied().unwrap_or(0);
        let first = round.checked_rem(self.ends.len() - 1).and_then(|rank| self.ends.get(rank)).copied().unwrap_or(0);
        let before = (own.start + total - first).checked_rem(total).unwrap_or(0);
        let at = |bytes: u64| {
            if bytes == total {
                return whole.end;
            }
            let portion = u128::from(whole.end - whole.start) * u128::from(bytes) / u128::from(total);
            let at = whole.start + u64::try_from(portion).unwrap_or(u64::MAX);
            self.nearest_unit(tensors, at).clamp(whole.start, whole.end)
        };
        at(before)..at(before + (own.end - own.start))
    }

    /// Returns the length of the longest part of a window.
    pub(super) fn longest(&self, tensors: &[Tensor], window: usize) -> u64 {
        let length = |rank| {
            let range = self.window(tensors, rank, window);
            range.end - range.start
        };
        let find = || (0..self.ends.len().saturating_sub(1)).map(length).max().unwrap_or(0);
        self.longest.get(window).map_or(0, |longest| *longest.get_or_init(find))
    }

    /// Returns the file ranges of a range of the schedule.
    pub(super) fn file_ranges<'a>(
        &'a self,
        tensors: &'a [Tensor],
        range: Range<u64>,
    ) -> impl Iterator<Item = FileRange> + 'a {
        let first = self.begins.partition_point(|&begin| begin <= range.start).saturating_sub(1);
        let end = range.end;
        let members = self.tensors.iter().zip(&self.begins).skip(first);
        members.take_while(move |&(_, &begin)| begin < end).filter_map(move |(&plan_index, &begin)| {
            let tensor = tensors.get(plan_index)?;
            let length = tensor.hull.end - tensor.hull.start;
            let (from, to) = (range.start.max(begin), end.min(begin + length));
            let file = |at: u64| tensor.hull.start + (at - begin);
            (from < to).then(|| FileRange { tensor: plan_index, range: file(from)..file(to), begin: from })
        })
    }

    /// Rounds an offset down to the start of an element.
    fn aligned(&self, tensors: &[Tensor], at: u64) -> u64 {
        let Some((tensor, begin)) = self.tensor_at(tensors, at) else { return at };
        at - (at - begin) % tensor.item_bytes.max(1)
    }

    /// Rounds an offset to the nearest start or end of a unit, or down to the start of an element if there are no units.
    pub(super) fn nearest_unit(&self, tensors: &[Tensor], at: u64) -> u64 {
        let Some((tensor, begin)) = self.tensor_at(tensors, at) else { return at };
        let offset = tensor.hull.start + (at - begin);
        let unit = tensor.unit_at(offset);
        let is_nearer_end = tensor.has_units() && unit.end - offset < offset - unit.start;
        let nearest = if is_nearer_end { unit.end } else { unit.start };
        begin + (nearest - tensor.hull.start)
    }

    /// Returns the tensor with the byte at an offset, and the tensor's offset.
    fn tensor_at<'a>(&self, tensors: &'a [Tensor], at: u64) -> Option<(&'a Tensor, u64)> {
        let index = self.begins.partition_point(|&begin| begin <= at).saturating_sub(1);
        Some((tensors.get(*self.tensors.get(index)?)?, *self.begins.get(index)?))
    }
}
