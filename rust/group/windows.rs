//! Window boundaries, chosen so that data in flight fit the buffers.

use super::schedule::ExchangeSchedule;
use super::{Group, Tensor};
use crate::checkpoint::region::{IndexRange, StridedRange};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};

/// Number of units of the largest tensor that a rank reads in a round at least, so that whole units leave the ranks nearly
/// equal parts.
const UNITS_MIN: u64 = 4;
/// Smallest window, in bytes: room for an element of any dtype.
const WINDOW_BYTES_MIN: u64 = 16;
/// Largest number of windows of a schedule. Each is a collective of all ranks, and takes memory of the plan. With the
/// default of 512 MiB, 16 TiB have fewer.
const WINDOWS_MAX: u64 = 1 << 16;

/// Window that may still grow.
struct OpenWindow {
    /// Bytes of the schedule.
    bytes: u64,
    /// Bytes that each rank receives.
    received: Vec<u64>,
    /// Largest number of ranks that receive the same byte.
    copies: u64,
    /// Upper bound of the bytes by which whole units make the part of a rank longer.
    unit_bytes: u64,
}

impl Group {
    /// Returns the boundaries of the rounds of all-gather windows, and the number of windows of each. A rank has two send
    /// and two receive buffers, since one window is in flight while the next is read.
    ///
    /// # Errors
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
    /// reads.
    ///
    /// # Errors
    /// `invalid-argument` if there would be too many windows.
    pub(super) fn exchange_cuts(&self, schedule: &ExchangeSchedule, rank_bytes: &[u64]) -> Result<Vec<u64>> {
        let room = self.exchange_room();
        let (largest, all) = (rank_bytes.iter().copied().max().unwrap_or(0), rank_bytes.iter().sum::<u64>().max(1));
        // A rank sends at most its part of the window, to at most `copies` ranks.
        let sends =
            |bytes: u64, copies: u64| u128::from(bytes) * u128::from(largest) * u128::from(copies) / u128::from(all);
        let mut cuts = vec![0];
        let mut begin = 0;
        let empty = || OpenWindow { bytes: 0, received: vec![0; self.ranks()], copies: 0, unit_bytes: 0 };
        let mut open = empty();
        for tensor in schedule.tensors(&self.tensors) {
            let shards: Vec<(usize, StridedRange)> =
                self.shards(tensor).map(|(rank, _, range)| (rank, range)).collect();
            let end = tensor.hull.end;
            let copies_max = self.copies_max(tensor);
            let mut at = tensor.hull.start;
            while at < end {
                let copies = open.copies.max(copies_max);
                let unit_bytes = open.unit_bytes.max(tensor.unit_bytes_max());
                let fits = |to: u64| {
                    let received = open.with(&shards, at, to);
                    let excess = u128::from(unit_bytes) * u128::from(copies);
                    sends(open.bytes + (to - at), copies) + excess <= u128::from(room)
                        && received.iter().all(|&bytes| bytes <= room)
                };
                let fitting = if fits(end) { end } else { furthest(tensor, at, fits) };
                let mut to = if fitting < end { tensor.unit_at(fitting).start.max(at) } else { end };
                if to == at && open.bytes == 0 {
                    // An element always fits.
                    to = fitting.max(at + tensor.item_bytes).min(end);
                }
                (open.received, open.copies, open.unit_bytes) = (open.with(&shards, at, to), copies, unit_bytes);
                open.bytes += to - at;
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
        if windows <= WINDOWS_MAX {
            return Ok(());
        }
        let message = format!(
            "window_bytes is {}, which divides the {} bytes that ranks exchange into more than {WINDOWS_MAX} windows; \
             pass a larger one",
            self.request.window_bytes,
            schedule.bytes()
        );
        Err(Error::new(Kind::InvalidArgument, message))
    }

    /// Returns an upper bound of the ranks that receive one element: the smallest overlap of index ranges in any
    /// dimension.
    pub(super) fn copies_max(&self, tensor: &Tensor) -> u64 {
        let index_ranges: Vec<Vec<IndexRange>> =
            self.requesters(tensor).map(|(request_ref, rank)| self.index_ranges(tensor, request_ref, rank)).collect();
        let overlap = |dim: usize| {
            let mut edges: Vec<(u64, i64)> = Vec::with_capacity(2 * index_ranges.len());
            for index_range in index_ranges
                .iter()
                .filter_map(|index_ranges| index_ranges.get(dim))
                .filter(|index_range| index_range.length > 0)
            {
                edges.extend([(index_range.start, 1), (index_range.start + index_range.length, -1)]);
            }
            // At equal positions, ends sort before starts.
            edges.sort_unstable();
            let (mut now, mut most) = (0_i64, 0);
            for (_, change) in edges {
                now += change;
                most = most.max(now);
            }
            u64::try_from(most).unwrap_or(0)
        };
        let overlaps = (0..tensor.shape.len()).map(overlap);
        overlaps.min().unwrap_or(to_u64(index_ranges.len()))
    }
}

impl OpenWindow {
    /// Returns the bytes that each rank receives if a file range is added.
    fn with(&self, shards: &[(usize, StridedRange)], from: u64, to: u64) -> Vec<u64> {
        let mut received = self.received.clone();
        for (rank, range) in shards {
            if let Some(bytes) = received.get_mut(*rank) {
                *bytes += range.bytes_before(to) - range.bytes_before(from);
            }
        }
        received
    }
}

/// Returns the furthest end of an element, from `at` on, that fits.
fn furthest(tensor: &Tensor, at: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let end = |elements: u64| at + elements * tensor.item_bytes;
    let (mut fitting, mut above) = (0, (tensor.hull.end - at) / tensor.item_bytes + 1);
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(end(middle)) {
            fitting = middle;
        } else {
            above = middle;
        }
    }
    end(fitting)
}
