//! Choice of the route of each tensor: whether ranks read it alone, through a page cache, or exchange its bytes.

use super::{Group, Strategy, Tensor};
use crate::checkpoint::region::StridedRange;
use crate::plan::GAP_BYTES;
use crate::remote::limits;
use crate::source::Source;
use std::collections::BTreeMap;
use std::ops::Range;

/// Largest alignment of reads past the page cache, in bytes. A row that is read alone may cost this much extra.
const BLOCK_BYTES: u64 = 4096;
/// Reading up to 1/16 of the bytes more than once costs less than an exchange.
pub(super) const EXCESS_DIVISOR: u64 = 16;
/// Smallest shard that a rank takes from the page cache if the load exchanges other tensors, in bytes. The kernel reads
/// megabytes around a page, and with small shards those would be bytes that other ranks read to send them.
const CACHED_BYTES_MIN: u64 = 1 << 20;

/// Path of a tensor's bytes to the ranks that requested them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Each rank reads its shard.
    Own,
    /// Each rank reads its shard through a page cache, which reads each byte once for all its ranks.
    Cached,
    /// Ranks read equal parts, and send each other what they keep.
    Exchange,
    /// Ranks read equal parts, and send them to all.
    Gather,
}

impl Route {
    /// Returns whether every rank reads its own shard.
    pub(super) fn is_own(self) -> bool {
        matches!(self, Route::Own | Route::Cached)
    }
}

/// Rules for the choice of routes.
#[derive(Clone, Copy, Debug, Default)]
struct RouteRules {
    /// Smallest shard that is taken from a page cache, in bytes.
    cached_bytes_min: u64,
    /// Whether small tensors that one rank needs are exchanged as those of several ranks are.
    exchanges_single: bool,
}

/// Blocks that are read for shards in file order.
#[derive(Clone, Copy, Debug, Default)]
struct BlockReads {
    bytes: u64,
    /// File and end of the last block.
    last: Option<(usize, u64)>,
}

impl BlockReads {
    /// Adds the blocks of a shard, with a gap before them of at most `gap_bytes`.
    fn add(&mut self, source: usize, blocks: &Range<u64>, gap_bytes: u64) {
        let before = self.last.filter(|(file, _)| *file == source).map(|(_, end)| end);
        let begin = before.filter(|end| blocks.start.saturating_sub(*end) <= gap_bytes).unwrap_or(blocks.start);
        self.bytes = self.bytes.saturating_add(blocks.end.saturating_sub(begin));
        self.last = Some((source, blocks.end.max(begin)));
    }
}

impl Tensor {
    /// Returns the number of bytes that a rank reads from storage if it reads a shard by itself: whole blocks, and short
    /// gaps to other shards of the tensor. An object is read without either.
    fn touched_bytes(&self, range: &StridedRange, is_remote: bool) -> u64 {
        if !self.has_units() {
            let (block_bytes, gap_bytes) = if is_remote { (1, 0) } else { (BLOCK_BYTES, GAP_BYTES) };
            let begin = if range.begin - self.begin <= gap_bytes { self.begin } else { range.begin };
            let end = self.begin + self.bytes;
            let end = if end - range.end() <= gap_bytes { end } else { range.end() };
            let hull = end.next_multiple_of(block_bytes) - begin / block_bytes * block_bytes;
            let are_apart = range.strides.last().is_some_and(|stride| stride.bytes - range.row_bytes > gap_bytes);
            return if are_apart { hull.min((range.row_bytes + block_bytes) * range.rows()) } else { hull };
        }
        let before = |at: u64| (at - self.begin) / self.unit_bytes * self.unit_bytes;
        let end = (range.end() - self.begin).next_multiple_of(self.unit_bytes).min(self.bytes);
        let of_rows = (range.row_bytes + 2 * self.unit_bytes).saturating_mul(range.rows());
        (end - before(range.begin)).min(of_rows)
    }
}

impl Group {
    /// Chooses the route of each tensor, and what verifies the data.
    pub(super) fn decide_routes(&mut self) {
        if self.tensors.iter().any(Tensor::has_units) {
            self.decide_what_verifies();
        }
        let mut rules = RouteRules::default();
        self.choose_routes(rules);
        if self.reads_blocks_again() {
            rules.exchanges_single = true;
            self.choose_routes(rules);
        }
        if self.tensors.iter().any(|tensor| !tensor.route.is_own()) {
            rules.cached_bytes_min = CACHED_BYTES_MIN;
            self.choose_routes(rules);
        }
    }

    /// Decides whether the ranks divide the files to verify them before they load. If they do, no reader needs whole units.
    fn decide_what_verifies(&mut self) {
        let units: Vec<u64> = self.tensors.iter().map(|tensor| tensor.unit_bytes).collect();
        self.tensors.iter_mut().for_each(|tensor| tensor.unit_bytes = tensor.item_bytes);
        self.choose_routes(RouteRules::default());
        self.verifies_first = self.caches_keep_all();
        if !self.verifies_first {
            self.tensors.iter_mut().zip(units).for_each(|(tensor, unit_bytes)| tensor.unit_bytes = unit_bytes);
        }
    }

    /// Returns whether the ranks of every page cache keep all data between them, or all but a sixteenth.
    fn caches_keep_all(&self) -> bool {
        let all = self.all_bytes();
        let mut kept: BTreeMap<u64, u64> = BTreeMap::new();
        for cache in &self.request.caches {
            let Some(cache) = cache else { return false };
            kept.insert(*cache, 0);
        }
        for tensor in &self.tensors {
            if tensor.route != Route::Cached {
                return false;
            }
            let mut of_tensor: BTreeMap<u64, u64> = BTreeMap::new();
            for (rank, _, range) in self.shards(tensor) {
                if let Some(cache) = self.cache_of(rank) {
                    let sum = of_tensor.entry(cache).or_default();
                    *sum = sum.saturating_add(range.bytes());
                }
            }
            for (cache, bytes) in of_tensor {
                *kept.entry(cache).or_default() += bytes.min(tensor.bytes);
            }
        }
        kept.values().all(|&bytes| bytes >= all - all / EXCESS_DIVISOR)
    }

    /// Returns whether ranks that read tensors alone, past the page cache, read many blocks and gaps that other ranks read,
    /// too: those of small tensors next to each other, which different ranks need.
    fn reads_blocks_again(&self) -> bool {
        let mut by_rank = vec![BlockReads::default(); self.ranks()];
        let mut by_any = BlockReads::default();
        for tensor in self.tensors.iter().filter(|tensor| tensor.route == Route::Own && self.has_one_reader(tensor)) {
            let is_remote = self.is_remote(tensor);
            let (block_bytes, gap_bytes) = if is_remote { (1, limits::GAP_BYTES) } else { (BLOCK_BYTES, GAP_BYTES) };
            let gap_bytes = if self.leaves_gaps() { 0 } else { gap_bytes };
            for (rank, _, range) in self.shards(tensor).filter(|(_, _, range)| range.bytes() > 0) {
                let begin = range.begin / block_bytes * block_bytes;
                let blocks = begin..range.end().next_multiple_of(block_bytes);
                by_any.add(tensor.source, &blocks, gap_bytes);
                if let Some(reads) = by_rank.get_mut(rank) {
                    reads.add(tensor.source, &blocks, gap_bytes);
                }
            }
        }
        let read: u64 = by_rank.iter().map(|reads| reads.bytes).sum();
        self.request.strategy == Strategy::Auto && read > by_any.bytes + by_any.bytes / EXCESS_DIVISOR
    }

    /// Returns whether one rank requests all bytes that are requested of a tensor.
    fn has_one_reader(&self, tensor: &Tensor) -> bool {
        let mut ranks = self.shards(tensor).filter(|(_, _, range)| range.bytes() > 0).map(|(rank, _, _)| rank);
        let first = ranks.next();
        ranks.all(|rank| Some(rank) == first)
    }

    fn is_remote(&self, tensor: &Tensor) -> bool {
        self.checkpoint.source(tensor.source).is_ok_and(Source::is_remote)
    }

    /// Chooses a route for each tensor.
    fn choose_routes(&mut self, rules: RouteRules) {
        let chosen: Vec<_> = self.tensors.iter().map(|tensor| self.route(tensor, rules)).collect();
        for (tensor, (route, hull)) in self.tensors.iter_mut().zip(chosen) {
            (tensor.route, tensor.hull) = (route, hull);
        }
    }

    fn route(&self, tensor: &Tensor, rules: RouteRules) -> (Route, Range<u64>) {
        let whole = tensor.whole();
        let mut spans = Vec::new();
        // Bytes that leave storage if every rank reads for itself: through each page cache, and past it.
        let (mut cached, mut uncached, mut kept) = (BTreeMap::new(), 0_u64, 0_u64);
        let mut is_cached = true;
        // Requests for an object cover short gaps. If those are the shards of other ranks, bytes are requested twice.
        let is_remote = self.is_remote(tensor);
        let mut has_short_rows = false;
        let (mut counts, mut is_whole) = (vec![0_usize; self.ranks()], true);
        for (rank, _, range) in self.shards(tensor) {
            if range.bytes() == 0 {
                continue;
            }
            spans.push(range.begin..range.end());
            is_whole &= range == whole;
            if let Some(count) = counts.get_mut(rank) {
                *count += 1;
            }
            has_short_rows |= range.row_bytes <= limits::GAP_BYTES;
            let touched = tensor.touched_bytes(&range, is_remote);
            uncached = uncached.saturating_add(touched);
            kept = kept.saturating_add(range.bytes());
            let cache = self.cache_of(rank);
            match cache.filter(|_| range.bytes() >= rules.cached_bytes_min) {
                Some(cache) => {
                    let sum = cached.entry(cache).or_insert(0_u64);
                    *sum = sum.saturating_add(touched);
                }
                None => is_cached = false,
            }
        }
        let (hull, needed) = union(spans);
        let through_caches = cached.values().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes.min(needed)));
        let has_one_reader = counts.iter().filter(|&&count| count > 0).count() < 2;
        let is_own = |read: u64, needed: u64| match self.request.strategy {
            _ if has_one_reader && !rules.exchanges_single => true,
            Strategy::Own => true,
            Strategy::Auto if is_remote && has_short_rows => false,
            Strategy::Auto => read <= needed.saturating_add(needed / EXCESS_DIVISOR),
            Strategy::Exchange => false,
        };
        // A page cache does not save the ranks the work on units of which each keeps only a part.
        let is_cached = is_cached && (!tensor.has_units() || is_own(uncached, kept));
        let route = if is_cached && is_own(through_caches, needed) {
            Route::Cached
        } else if is_own(uncached, needed) {
            Route::Own
        } else if is_whole && counts.iter().all(|&count| count == 1) {
            Route::Gather
        } else {
            Route::Exchange
        };
        (route, hull)
    }
}

/// Returns the range from the first byte to the end of the last one of some ranges, and the number of bytes that are in at
/// least one of them.
fn union(mut ranges: Vec<Range<u64>>) -> (Range<u64>, u64) {
    ranges.sort_unstable_by_key(|range| range.start);
    let begin = ranges.first().map_or(0, |range| range.start);
    let (end, bytes) = ranges.iter().fold((begin, 0), |(end, bytes), range| {
        let new = range.end.saturating_sub(range.start.max(end));
        (end.max(range.end), bytes + new)
    });
    (begin..end, bytes)
}
