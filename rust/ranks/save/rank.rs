//! Work of one rank in a save: what it sends in each window, and what it writes.

use super::{File, Owner, Run, SavePlan, Tensor, length};
use crate::num::to_u64;
use std::ops::{ControlFlow, Range};

/// Bytes of a local tensor that a rank sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// Receiver.
    pub rank: usize,
    /// Index of the tensor in the request.
    pub tensor: usize,
    /// Bytes of the local tensor.
    pub range: Range<u64>,
    /// Offset in the send buffer in bytes.
    pub offset: u64,
}

/// Whole blocks of a file that a rank writes, except that the last one may end with the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Index of the file.
    pub file: usize,
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Bytes of tensors in the range, as indices of [`RankWindow::sources`]. All other bytes belong to the header.
    pub sources: Range<usize>,
}

/// Bytes of a region of a tensor that are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Index of the tensor in the order of the files.
    index: usize,
    region: usize,
    /// Byte range of the tensor that has the bytes, of which other regions have some.
    range: Range<u64>,
    /// Index of the tensor in the request.
    pub tensor: usize,
    /// The bytes, as a range of the local tensor of the ranks that hold the region.
    pub local: Range<u64>,
    /// Rank of whose local tensor they are.
    sender: usize,
    /// Offset in the receive buffer in bytes, or `None` if the bytes belong to the rank's own tensor.
    pub received: Option<u64>,
}

/// Work of a rank in one window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankWindow {
    /// Ranges to send, grouped by receiver.
    pub sends: Vec<Send>,
    /// Ranges to write, in the order of the files.
    pub writes: Vec<Write>,
    /// Sources of the ranges.
    pub sources: Vec<Source>,
}

/// Work of a rank in all windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Its work in each window.
    pub windows: Vec<RankWindow>,
}

/// Range of a file with one writer, in one window.
struct Owned {
    range: Range<u64>,
    window: usize,
}

impl SavePlan {
    /// Plans the work of a rank.
    pub fn rank_plan(&self, rank: usize) -> RankPlan {
        let mut plan = RankPlan { rank, windows: vec![RankWindow::default(); self.windows()] };
        for (number, file) in self.files.iter().enumerate() {
            if rank == 0 {
                let header = 0..self.block_end(to_u64(file.layout.header().len()));
                let owned = Owned { range: header, window: file.window };
                self.add_write(&mut plan, number, file, file.tensors.start, owned);
            }
            for index in file.tensors.clone() {
                let Some(tensor) = self.tensors.get(index) else { continue };
                if tensor.begin == tensor.end || tensor.writers.regions().of_rank(rank).is_none() {
                    continue;
                }
                self.for_each_owned(tensor, rank, |owned| {
                    self.add_write(&mut plan, number, file, index, owned);
                });
                self.add_sends(&mut plan, file, index, tensor);
            }
        }
        plan.windows.iter_mut().for_each(RankWindow::lay_out_buffers);
        plan
    }

    /// Calls `visit` with the ranges of a tensor's file that the parts of a rank begin in.
    fn for_each_owned(&self, tensor: &Tensor, rank: usize, mut visit: impl FnMut(Owned)) {
        tensor.writers.for_each_run(rank, tensor.position, |run, part| {
            if let Some(part) = part {
                self.for_each_slice(tensor, run, part, self.write_bytes_max, &mut visit);
            }
        });
    }

    /// Calls `visit` with the ranges of the file that a part of a run begins in, each in one window and of at most `most`
    /// bytes.
    fn for_each_slice(&self, tensor: &Tensor, run: &Run<'_>, part: usize, most: u64, mut visit: impl FnMut(Owned)) {
        let row = run.begin.checked_div(tensor.writers.row_bytes()).unwrap_or(0);
        let begin = self.block_end(tensor.begin + run.part_begin(part));
        let end = self.block_end(tensor.begin + run.part_begin(part + 1));
        let step = tensor.cut.blocks().saturating_mul(self.block_bytes);
        let mut first = begin;
        while first < end {
            let step_end = begin.saturating_add(((first - begin) / step.max(1) + 1).saturating_mul(step));
            let last = first.saturating_add(most).min(step_end).min(end);
            let window = tensor.window + tensor.cut.window(row, (first - begin) / self.block_bytes);
            visit(Owned { range: first..last, window });
            first = last;
        }
    }

    /// Adds a range that the rank writes. `index` is the first tensor that may have bytes in it.
    fn add_write(&self, plan: &mut RankPlan, number: usize, file: &File, index: usize, owned: Owned) {
        let rank = plan.rank;
        let Some(window) = plan.windows.get_mut(owned.window) else { return };
        let range = owned.range.start..owned.range.end.min(file.layout.file_bytes());
        let first = window.sources.len();
        for index in index..file.tensors.end {
            let Some(tensor) = self.tensors.get(index) else { break };
            let (from, to) = (tensor.begin.max(range.start), tensor.end.min(range.end));
            if tensor.begin >= range.end {
                break;
            }
            if from >= to {
                continue;
            }
            let own = from - tensor.begin..to - tensor.begin;
            let regions = tensor.writers.regions();
            for region in regions.overlapping(&own) {
                let local = regions.local_range(region, &own);
                let Some(sender) = regions.sender(region, rank).filter(|_| !local.is_empty()) else { continue };
                window.sources.push(Source {
                    index,
                    region,
                    range: own.clone(),
                    tensor: tensor.position,
                    local,
                    sender,
                    received: (sender != rank).then_some(0),
                });
            }
        }
        match window.writes.last_mut() {
            Some(last)
                if last.file == number
                    && last.range.end == range.start
                    && range.end - last.range.start <= self.write_bytes_max =>
            {
                last.range.end = range.end;
                last.sources.end = window.sources.len();
            }
            _ => window.writes.push(Write { file: number, range, sources: first..window.sources.len() }),
        }
    }

    /// Adds what the rank sends of its local tensor.
    fn add_sends(&self, plan: &mut RankPlan, file: &File, index: usize, tensor: &Tensor) {
        let rank = plan.rank;
        let regions = tensor.writers.regions();
        let Some((region, _)) = regions.of_rank(rank) else { return };
        let hull = regions.hull(region);
        let mut send = |owner: Owner, range: Range<u64>| {
            if range.is_empty() || owner.rank == rank || regions.sender(region, owner.rank) != Some(rank) {
                return;
            }
            let local = regions.local_range(region, &range);
            if let Some(window) = plan.windows.get_mut(owner.window).filter(|_| !local.is_empty()) {
                window.sends.push(Send { rank: owner.rank, tensor: tensor.position, range: local, offset: 0 });
            }
        };
        tensor.writers.for_each_run(rank, tensor.position, |run, _| {
            let begin = tensor.begin + run.begin;
            let head_end = (self.block_end(begin) - tensor.begin).min(run.end);
            if run.begin < head_end
                && let Some(owner) = self.owner(file, index, self.block_begin(begin))
            {
                send(owner, run.begin..head_end);
            }
            let (from, to) = (hull.start.max(head_end), hull.end.min(run.end));
            if from >= to {
                return;
            }
            // The part before may have the rest of a block.
            let first = run.part_at(self.block_begin(tensor.begin + from).saturating_sub(tensor.begin).max(run.begin));
            let last = run.part_at(to - 1);
            for part in first..=last {
                self.for_each_slice(tensor, run, part, u64::MAX, |owned| {
                    let slice = owned.range.start - tensor.begin..(owned.range.end - tensor.begin).min(run.end);
                    send(Owner { rank: run.writer(part), window: owned.window }, slice);
                });
            }
        });
    }

    /// Calls `visit` with each contiguous range of the file that a source has within `range`, and its first byte counted
    /// from the begin of the source's bytes. Ranges are in ascending order.
    pub fn for_each_piece(&self, source: &Source, range: &Range<u64>, mut visit: impl FnMut(Range<u64>, u64)) {
        let Some(tensor) = self.tensors.get(source.index) else { return };
        let begin = |at: u64| at.saturating_sub(tensor.begin).max(source.range.start);
        let own = begin(range.start)..range.end.saturating_sub(tensor.begin).min(source.range.end);
        if own.start >= own.end {
            return;
        }
        let regions = tensor.writers.regions();
        let mut offset = regions.bytes_before(source.region, own.start) - source.local.start;
        regions.for_each_run(source.region, &own, |run| {
            let bytes = length(&run);
            visit(tensor.begin + run.start..tensor.begin + run.end, offset);
            offset += bytes;
            ControlFlow::Continue(())
        });
    }

    /// Returns the range of the file in which a source has bytes.
    pub fn file_range(&self, source: &Source) -> Range<u64> {
        let begin = self.tensors.get(source.index).map_or(0, |tensor| tensor.begin);
        begin + source.range.start..begin + source.range.end
    }

    /// Returns whether the bytes of a source are contiguous in the file.
    pub fn is_contiguous(&self, source: &Source) -> bool {
        let Some(tensor) = self.tensors.get(source.index) else { return false };
        let mut first = 0;
        tensor.writers.regions().for_each_run(source.region, &source.range, |run| {
            first = length(&run);
            ControlFlow::Break(())
        });
        first == length(&source.local)
    }
}

impl RankPlan {
    /// Returns the range of each local tensor in which the bytes are that the rank writes or sends, in the order of the
    /// request. It is empty for a tensor of which the rank writes and sends nothing.
    pub fn used_ranges(&self, tensors: usize) -> Vec<Range<u64>> {
        let mut used = vec![0..0; tensors];
        let mut add = |tensor: usize, range: &Range<u64>| {
            if let Some(used) = used.get_mut(tensor) {
                *used = if used.start == used.end {
                    range.clone()
                } else {
                    used.start.min(range.start)..used.end.max(range.end)
                };
            }
        };
        for window in &self.windows {
            window.sends.iter().for_each(|send| add(send.tensor, &send.range));
            let own = window.sources.iter().filter(|source| source.received.is_none());
            own.for_each(|source| add(source.tensor, &source.local));
        }
        used
    }
}

impl RankWindow {
    /// Sets the offsets of ranges in the send and receive buffers.
    fn lay_out_buffers(&mut self) {
        // Ranges of the same two ranks keep the order of the files.
        self.sends.sort_by_key(|send| send.rank);
        let mut offset = 0;
        for send in &mut self.sends {
            send.offset = offset;
            offset += length(&send.range);
        }
        let mut received: Vec<&mut Source> =
            self.sources.iter_mut().filter(|source| source.received.is_some()).collect();
        received.sort_by_key(|source| source.sender);
        let mut offset = 0;
        for source in received {
            source.received = Some(offset);
            offset += length(&source.local);
        }
    }

    /// Returns the bytes for each of `ranks` ranks, and those from each.
    pub fn splits(&self, ranks: usize) -> (Vec<u64>, Vec<u64>) {
        let mut splits = (vec![0; ranks], vec![0; ranks]);
        let add = |counts: &mut [u64], rank: usize, range: &Range<u64>| {
            counts.get_mut(rank).into_iter().for_each(|count| *count += length(range));
        };
        self.sends.iter().for_each(|send| add(&mut splits.0, send.rank, &send.range));
        let received = self.sources.iter().filter(|source| source.received.is_some());
        received.for_each(|source| add(&mut splits.1, source.sender, &source.local));
        splits
    }
}
