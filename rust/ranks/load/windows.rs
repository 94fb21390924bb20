//! Window boundaries, chosen so that data in flight fit the buffers.

use super::schedule::ExchangeSchedule;
use super::{LoadPlan, Tensor};
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::ranks::{check_windows, most};
use std::ops::Range;

/// Number of units of the largest tensor that a rank reads in a round at least, so that whole units leave the ranks nearly
/// equal parts.
const UNITS_MIN: u64 = 4;
/// Smallest window, in bytes: room for an element of any dtype.
const WINDOW_BYTES_MIN: u64 = 16;

/// Window that may still grow.
struct OpenWindow {
    /// Bytes of the schedule.
    bytes: u64,
    /// For each request list, an upper bound of the bytes that a rank receives: the sum of the largest shards.
    received: Vec<u64>,
    /// Largest of these bounds.
    largest_received: u64,
    /// Largest number of ranks that receive the same byte.
    copies: u64,
    /// Upper bound of the bytes by which whole units make the part of a rank longer.
    unit_bytes: u64,
}

impl LoadPlan {
    /// Returns the boundaries of the rounds of all-gather windows, and the number of windows of each. A rank has two
    /// send and two receive buffers, since one window is in flight while the next is read. Fails with
    /// `invalid-argument` if there would be too many windows.
    pub(super) fn gather_cuts(&self, schedule: &ExchangeSchedule) -> Result<(Vec<u64>, usize)> {
        let ranks = to_u64(self.ranks());
        let room = (self.request.window_bytes / (2 * (ranks + 1))).max(WINDOW_BYTES_MIN);
        let unit_bytes = schedule.tensors(&self.tensors).map(Tensor::unit_bytes_max).max().unwrap_or(0);
        // Both ends of a part, and of a round, are moved to the nearest unit.
        let excess = 2 * unit_bytes;
        let part = room.saturating_sub(excess).max(UNITS_MIN * unit_bytes);
        let part = part.min(schedule.bytes().div_ceil(ranks)).max(1);
        let slices = if unit_bytes == 0 { 1 } else { (part + excess).div_ceil(room) };
        let rounds = schedule.bytes().div_ceil(part * ranks);
        self.check_windows(schedule, rounds.saturating_mul(slices))?;
        let cut = |round: u64| schedule.nearest_unit(&self.tensors, (round * part * ranks).min(schedule.bytes()));
        Ok(((0..=rounds).map(cut).collect(), to_usize(slices)))
    }

    /// Returns how many bytes a rank may send or receive in an all-to-all window.
    pub(super) fn exchange_room(&self) -> u64 {
        (self.request.window_bytes / 4).max(WINDOW_BYTES_MIN)
    }

    /// Returns the boundaries of all-to-all windows. No rank sends or receives more than a fourth of the limit in one
    /// window, since there are two buffers for each direction. `rank_bytes` is the number of bytes that each rank
    /// reads. Fails with `invalid-argument` if there would be too many windows.
    pub(super) fn exchange_cuts(&self, schedule: &ExchangeSchedule, rank_bytes: &[u64]) -> Result<Vec<u64>> {
        let room = self.exchange_room();
        let (largest, all) = (rank_bytes.iter().copied().max().unwrap_or(0), rank_bytes.iter().sum::<u64>().max(1));
        // A rank sends at most its part of the window, to at most `copies` ranks.
        let sends =
            |bytes: u64, copies: u64| u128::from(bytes) * u128::from(largest) * u128::from(copies) / u128::from(all);
        let mut cuts = vec![0];
        let mut begin = 0;
        let empty = || OpenWindow {
            bytes: 0,
            received: vec![0; self.request.requests.len()],
            largest_received: 0,
            copies: 0,
            unit_bytes: 0,
        };
        let mut open = empty();
        for tensor in schedule.tensors(&self.tensors) {
            let end = tensor.hull.end;
            let copies_max = tensor.class.copies_max;
            let mut at = tensor.hull.start;
            while at < end {
                let copies = open.copies.max(copies_max);
                let unit_bytes = open.unit_bytes.max(tensor.unit_bytes_max());
                let fits = |to: u64| {
                    let excess = u128::from(unit_bytes) * u128::from(copies);
                    sends(open.bytes + (to - at), copies) + excess <= u128::from(room)
                        && open.received_with(tensor, at..to).1 <= room
                };
                let fitting = if fits(end) { end } else { furthest(tensor, at, fits) };
                let mut to = if fitting < end { tensor.unit_at(fitting).start.max(at) } else { end };
                if to == at && open.bytes == 0 {
                    // An element always fits.
                    to = fitting.max(at + tensor.item_bytes).min(end);
                }
                open.add(tensor, at..to);
                (open.copies, open.unit_bytes) = (copies, unit_bytes);
                at = to;
                if at < end {
                    begin += open.bytes;
                    cuts.push(begin);
                    self.check_windows(schedule, to_u64(cuts.len()))?;
                    open = empty();
                }
            }
        }
        if open.bytes > 0 {
            cuts.push(begin + open.bytes);
        }
        Ok(cuts)
    }

    fn check_windows(&self, schedule: &ExchangeSchedule, windows: u64) -> Result<()> {
        let divided = format!("the {} bytes that ranks exchange", schedule.bytes());
        check_windows(windows, self.request.window_bytes, &divided)
    }
}

impl OpenWindow {
    /// Returns the bounds of the lists that request the tensor if a file range is added, and the largest of all bounds.
    fn received_with(&self, tensor: &Tensor, file_range: Range<u64>) -> (Vec<(usize, u64)>, u64) {
        let range = file_range.start - tensor.begin..file_range.end - tensor.begin;
        let mut bounds: Vec<(usize, u64)> = Vec::new();
        let mut largest_received = self.largest_received;
        for (&list, bytes) in tensor.class.lists.iter().zip(tensor.class.largest_within(range)) {
            let bound = match bounds.last_mut() {
                Some((last, bound)) if *last == list => {
                    *bound += bytes;
                    *bound
                }
                _ => {
                    let bound = self.received.get(list).map_or(bytes, |received| received + bytes);
                    bounds.push((list, bound));
                    bound
                }
            };
            largest_received = largest_received.max(bound);
        }
        (bounds, largest_received)
    }

    /// Adds a file range.
    fn add(&mut self, tensor: &Tensor, file_range: Range<u64>) {
        self.bytes += file_range.end - file_range.start;
        let (bounds, largest_received) = self.received_with(tensor, file_range);
        self.largest_received = largest_received;
        for (list, bound) in bounds {
            self.received.get_mut(list).into_iter().for_each(|received| *received = bound);
        }
    }
}

/// Returns the furthest end of an element, from `at` on, that fits.
fn furthest(tensor: &Tensor, at: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let end = |elements: u64| at + elements * tensor.item_bytes;
    end(most((tensor.hull.end - at) / tensor.item_bytes, |elements| fits(end(elements))))
}
