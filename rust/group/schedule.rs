//! Schedule of an exchange: tensors that ranks read together, window by window.

use super::{Route, Tensor};
use std::ops::Range;

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

/// Requested bytes of some tensors, in file order, divided into windows. Every rank reads a part of each window.
#[derive(Debug, Default)]
pub(super) struct ExchangeSchedule {
    /// Indices into the tensors of the plan.
    tensors: Vec<usize>,
    /// Offset of each tensor in the schedule, and the end of the last.
    begins: Vec<u64>,
    /// Offset of each window in the schedule, and the end of the last.
    cuts: Vec<u64>,
    /// Prefix sums of the bytes that the ranks read, from 0 to the total.
    ends: Vec<u64>,
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
        self.cuts.len().saturating_sub(1)
    }

    /// Divides the schedule into windows at these offsets, and each window into one part for each rank, in proportion
    /// to `rank_bytes`.
    pub(super) fn cut(&mut self, cuts: Vec<u64>, rank_bytes: &[u64]) {
        let add = |sum: &mut u64, bytes: &u64| {
            *sum += bytes;
            Some(*sum)
        };
        self.ends = std::iter::once(0).chain(rank_bytes.iter().scan(0, add)).collect();
        self.cuts = cuts;
    }

    /// Returns the part of a window that a rank reads.
    pub(super) fn window(&self, tensors: &[Tensor], rank: usize, window: usize) -> Range<u64> {
        let whole = match self.cuts.get(window..window + 2) {
            Some(&[begin, end]) => begin..end,
            _ => return 0..0,
        };
        let total = self.ends.last().copied().unwrap_or(0);
        let at = |index: usize| {
            let bytes = self.ends.get(index).copied().unwrap_or(total);
            if bytes == total {
                return whole.end;
            }
            let portion = u128::from(whole.end - whole.start) * u128::from(bytes) / u128::from(total);
            self.aligned(tensors, whole.start + u64::try_from(portion).unwrap_or(u64::MAX))
        };
        at(rank)..at(rank + 1)
    }

    /// Returns the length of the longest part of a window.
    pub(super) fn longest(&self, tensors: &[Tensor], window: usize) -> u64 {
        let length = |rank| {
            let range = self.window(tensors, rank, window);
            range.end - range.start
        };
        (0..self.ends.len().saturating_sub(1)).map(length).max().unwrap_or(0)
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
    pub(super) fn aligned(&self, tensors: &[Tensor], at: u64) -> u64 {
        let index = self.begins.partition_point(|&begin| begin <= at).saturating_sub(1);
        let begin = self.begins.get(index).copied().unwrap_or(0);
        let item_bytes =
            self.tensors.get(index).and_then(|&plan_index| tensors.get(plan_index)).map_or(1, |t| t.item_bytes);
        at - (at - begin) % item_bytes.max(1)
    }
}
