//! Traffic of a group load: reads, sends and receives of each rank in each window.

use super::classes::ClassShard;
use super::schedule::FileRange;
use super::{Collective, LoadPlan, OwnShard, Tensor};
use std::ops::Range;

/// Bytes `begin..end` of a shard, counted in its contiguous form and in the stored dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRange {
    /// Rank that keeps the shard.
    pub rank: usize,
    /// Index of the request of that rank.
    pub item: usize,
    /// First byte.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// Reads of a rank in a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outgoing {
    /// Ranges that the rank keeps, read directly into its tensors.
    pub local: Vec<ShardRange>,
    /// Ranges to send, with their offsets in the send buffer, grouped by receiver.
    pub sends: Vec<(ShardRange, u64)>,
    /// Bytes for each receiver; a single number for an all-gather.
    pub splits: Vec<u64>,
}

/// Receives of a rank in a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Incoming {
    /// Received ranges, with their offsets in the receive buffer, grouped by sender.
    pub shard_ranges: Vec<(ShardRange, u64)>,
    /// Bytes from each sender.
    pub splits: Vec<u64>,
}

impl ShardRange {
    /// Returns the part of a shard in a range of the file, or `None` if it has no bytes.
    fn within(file_range: &Range<u64>, tensor: &Tensor, shard: &ClassShard) -> Option<ShardRange> {
        let before = |at: u64| shard.rows.bytes_before(at.saturating_sub(tensor.begin));
        let (begin, end) = (before(file_range.start), before(file_range.end));
        let item = tensor.item_of(shard);
        (begin < end).then_some(ShardRange { rank: shard.rank, item, begin, end })
    }

    fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

impl LoadPlan {
    /// Returns the number of windows: first those with an all-to-all, then those with an all-gather.
    pub fn windows(&self) -> usize {
        let shared = self.exchange.windows() + self.gather.windows();
        let is_requested = || self.tensors.iter().any(|tensor| !tensor.hull.is_empty());
        if shared == 0 { usize::from(is_requested()) } else { shared }
    }

    /// Returns the collective that follows the reads of a window.
    pub fn collective(&self, window: usize) -> Collective {
        if window < self.exchange.windows() {
            Collective::Exchange
        } else if window < self.exchange.windows() + self.gather.windows() {
            Collective::Gather
        } else {
            Collective::None
        }
    }

    /// Returns the reads of a rank in a window.
    pub fn outgoing(&self, rank: usize, window: usize) -> Outgoing {
        let local = self.own(rank, window).into_iter().map(|(_, shard_range)| shard_range).collect();
        let mut outgoing = Outgoing { local, ..Outgoing::default() };
        match self.collective(window) {
            Collective::None => {}
            Collective::Gather => {
                outgoing.sends.extend(self.gathered(rank, rank, window));
                outgoing.splits = vec![self.segment_bytes(window)];
            }
            Collective::Exchange => {
                let mut by_rank = vec![Vec::new(); self.ranks()];
                for file_range in self.exchanged(rank, window) {
                    for shard_range in self.shard_ranges(&file_range, None) {
                        if let Some(shard_ranges) = by_rank.get_mut(shard_range.rank) {
                            shard_ranges.push(shard_range);
                        }
                    }
                }
                if let Some(local) = by_rank.get_mut(rank) {
                    outgoing.local.append(local);
                }
                let mut offset = 0;
                for shard_ranges in by_rank {
                    let begin = offset;
                    for shard_range in shard_ranges {
                        outgoing.sends.push((shard_range, offset));
                        offset += shard_range.bytes();
                    }
                    outgoing.splits.push(offset - begin);
                }
            }
        }
        outgoing
    }

    /// Returns the receives of a rank in a window.
    pub fn incoming(&self, rank: usize, window: usize) -> Incoming {
        let mut incoming = Incoming::default();
        let mut offset = 0;
        let segment_bytes = if self.collective(window) == Collective::Gather { self.segment_bytes(window) } else { 0 };
        for sender in 0..self.ranks() {
            let begin = offset;
            match self.collective(window) {
                Collective::None => {}
                Collective::Gather => {
                    let gathered = self.gathered(sender, rank, window);
                    incoming.shard_ranges.extend(gathered.map(|(shard_range, at)| (shard_range, begin + at)));
                    offset += segment_bytes;
                }
                Collective::Exchange if sender == rank => {}
                Collective::Exchange => {
                    for file_range in self.exchanged(sender, window) {
                        for shard_range in self.shard_ranges(&file_range, Some(rank)) {
                            incoming.shard_ranges.push((shard_range, offset));
                            offset += shard_range.bytes();
                        }
                    }
                }
            }
            incoming.splits.push(offset - begin);
        }
        incoming
    }

    /// Returns the file ranges that a rank reads in a window, each with the index of its file.
    pub fn reads(&self, rank: usize, window: usize) -> Vec<(usize, Range<u64>)> {
        let mut reads = Vec::new();
        for (shard, shard_range) in self.own(rank, window) {
            let Some(tensor) = self.tensors.get(shard.tensor) else { continue };
            let Some(ClassShard { rows, .. }) = tensor.class.shards_of(rank).get(shard.shard) else { continue };
            let at = |byte: u64| tensor.begin + rows.row_begin(byte / rows.row_bytes) + byte % rows.row_bytes;
            reads.push((tensor.source, at(shard_range.begin)..at(shard_range.end - 1) + 1));
        }
        let (schedule, range) = match self.collective(window) {
            Collective::None => return reads,
            Collective::Exchange => (&self.exchange, self.exchange.window(&self.tensors, rank, window)),
            Collective::Gather => (&self.gather, self.gather_range(rank, window)),
        };
        for file_range in schedule.file_ranges(&self.tensors, range) {
            let source = self.tensors.get(file_range.tensor).map_or(0, |tensor| tensor.source);
            reads.push((source, file_range.range));
        }
        reads
    }

    /// Returns the bytes that each rank (row) sends to each rank (column) in a window.
    pub fn sent_bytes(&self, window: usize) -> Vec<Vec<u64>> {
        let ranks = self.ranks();
        let mut sends = vec![vec![0; ranks]; ranks];
        for (sender, row) in sends.iter_mut().enumerate() {
            match self.collective(window) {
                Collective::None => {}
                Collective::Gather => {
                    let range = self.gather_range(sender, window);
                    let others = row.iter_mut().enumerate().filter(|(rank, _)| *rank != sender);
                    others.for_each(|(_, bytes)| *bytes = range.end - range.start);
                }
                Collective::Exchange => *row = self.outgoing(sender, window).splits,
            }
        }
        sends
    }

    /// Returns the bytes that every rank contributes to an all-gather, including padding.
    fn segment_bytes(&self, window: usize) -> u64 {
        self.gather.longest(&self.tensors, window - self.exchange.windows())
    }

    fn gather_range(&self, rank: usize, window: usize) -> Range<u64> {
        self.gather.window(&self.tensors, rank, window - self.exchange.windows())
    }

    /// Returns the file ranges that a rank reads in an all-to-all window.
    fn exchanged(&self, rank: usize, window: usize) -> impl Iterator<Item = FileRange> + '_ {
        self.exchange.file_ranges(&self.tensors, self.exchange.window(&self.tensors, rank, window))
    }

    /// Returns the parts of a rank's shards that a sender contributes to an all-gather, with their offsets in its segment.
    fn gathered(&self, sender: usize, rank: usize, window: usize) -> impl Iterator<Item = (ShardRange, u64)> + '_ {
        let range = self.gather_range(sender, window);
        let first = range.start;
        self.gather.file_ranges(&self.tensors, range).filter_map(move |file_range| {
            let shard_range = self.shard_ranges(&file_range, Some(rank)).next()?;
            Some((shard_range, file_range.begin - first))
        })
    }

    /// Returns the parts of the shards of one rank or of all in a file range, in the order of ranks and requests.
    fn shard_ranges<'a>(
        &'a self,
        file_range: &'a FileRange,
        rank: Option<usize>,
    ) -> impl Iterator<Item = ShardRange> + 'a {
        self.tensors.get(file_range.tensor).into_iter().flat_map(move |tensor| {
            let shards = rank.map_or(&tensor.class.shards[..], |rank| tensor.class.shards_of(rank));
            shards.iter().filter_map(|shard| ShardRange::within(&file_range.range, tensor, shard))
        })
    }

    /// Returns the part of a rank's own reads that falls into a window. Windows have equal parts.
    fn own(&self, rank: usize, window: usize) -> Vec<(OwnShard, ShardRange)> {
        let shards = self.own_shards(rank);
        let total = shards.iter().map(|shard| u128::from(shard.bytes)).sum::<u128>();
        let number = |value: usize| u128::try_from(value).unwrap_or(u128::MAX);
        let cut = |window: usize| {
            let at = total * number(window) / number(self.windows()).max(1);
            u64::try_from(at).unwrap_or(u64::MAX)
        };
        let (from, to) = (cut(window), cut(window + 1));
        let mut shard_ranges = Vec::new();
        let mut at = 0_u64;
        for &shard in shards {
            let item_bytes = self.tensors.get(shard.tensor).map_or(1, |tensor| tensor.item_bytes);
            let inside = |cut: u64| {
                let inside = cut.saturating_sub(at).min(shard.bytes);
                // Both windows at a boundary round it to the same element.
                if inside == shard.bytes { inside } else { inside - inside % item_bytes }
            };
            let (begin, end) = (inside(from), inside(to));
            if begin < end {
                shard_ranges.push((shard, ShardRange { rank, item: shard.item, begin, end }));
            }
            at += shard.bytes;
        }
        shard_ranges
    }
}
