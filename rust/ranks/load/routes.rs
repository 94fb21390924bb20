//! Choice of the route of each tensor: whether ranks read it alone, through a page cache, or exchange its bytes.

use super::classes::Readers;
use super::{LoadPlan, Strategy, Tensor};
use crate::checkpoint::region::StridedRange;
use crate::plan::GAP_BYTES;
use crate::remote::transfer::limits;
use crate::source::Source;
use std::collections::HashMap;
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

/// Properties of a tensor on which its route depends.
#[derive(PartialEq, Eq, Hash)]
struct RouteKey {
    class: usize,
    unit_bytes: u64,
    is_remote: bool,
    /// Offset of the first byte in a block of the file.
    begin: u64,
}

/// Rules for the choice of routes.
#[derive(Clone, Copy, Debug, Default)]
struct RouteRules {
    /// Smallest shard that is taken from a page cache, in bytes.
    cached_bytes_min: u64,
    /// Whether small tensors that one rank needs are exchanged as tensors of several ranks are.
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
    /// Returns the number of bytes that a rank reads from storage if it reads rows of the tensor by itself: whole blocks,
    /// and short gaps to other shards of the tensor. An object is read without either.
    fn touched_bytes(&self, rows: &StridedRange, is_remote: bool) -> u64 {
        if !self.has_units() {
            let (block_bytes, gap_bytes) = if is_remote { (1, 0) } else { (BLOCK_BYTES, GAP_BYTES) };
            let begin = if rows.begin <= gap_bytes { 0 } else { rows.begin };
            let end = if self.bytes - rows.end() <= gap_bytes { self.bytes } else { rows.end() };
            let (begin, end) = (self.begin + begin, self.begin + end);
            let hull = end.next_multiple_of(block_bytes) - begin / block_bytes * block_bytes;
            let are_apart = rows.strides.last().is_some_and(|stride| stride.bytes - rows.row_bytes > gap_bytes);
            return if are_apart { hull.min((rows.row_bytes + block_bytes) * rows.rows()) } else { hull };
        }
        let begin = rows.begin / self.unit_bytes * self.unit_bytes;
        let end = rows.end().next_multiple_of(self.unit_bytes).min(self.bytes);
        let of_rows = (rows.row_bytes + 2 * self.unit_bytes).saturating_mul(rows.rows());
        (end - begin).min(of_rows)
    }
}

impl LoadPlan {
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
        if self.cache_numbers.contains(&None) || self.tensors.iter().any(|tensor| tensor.route != Route::Cached) {
            return false;
        }
        let mut kept = vec![0_u64; self.caches()];
        for (class, count) in self.classes(|_| true) {
            let mut of_tensor = vec![0_u64; kept.len()];
            for shard in &class.shards {
                self.add_to_cache(&mut of_tensor, shard.rank, shard.rows.bytes());
            }
            for (sum, bytes) in kept.iter_mut().zip(of_tensor) {
                *sum = sum.saturating_add(bytes.min(class.bytes).saturating_mul(count));
            }
        }
        kept.iter().all(|&bytes| bytes >= all - all / EXCESS_DIVISOR)
    }

    /// Returns the number of page caches.
    fn caches(&self) -> usize {
        self.cache_numbers.iter().flatten().max().map_or(0, |last| last + 1)
    }

    /// Adds bytes of a rank to the sum of its page cache. Returns whether it has one.
    fn add_to_cache(&self, sums: &mut [u64], rank: usize, bytes: u64) -> bool {
        let cache = self.cache_numbers.get(rank).copied().flatten();
        let sum = cache.and_then(|cache| sums.get_mut(cache));
        sum.map(|sum| *sum = sum.saturating_add(bytes)).is_some()
    }

    /// Returns whether ranks that read tensors alone, past the page cache, read many blocks and gaps that other ranks read,
    /// too: bytes of small tensors next to each other, which different ranks need.
    fn reads_blocks_again(&self) -> bool {
        let mut by_rank = vec![BlockReads::default(); self.ranks()];
        let mut by_any = BlockReads::default();
        let leaves_gaps = self.leaves_gaps();
        for tensor in self.tensors.iter().filter(|tensor| tensor.route == Route::Own) {
            let Readers::One(rank) = tensor.class.readers else { continue };
            let is_remote = self.is_remote(tensor);
            let (block_bytes, gap_bytes) = if is_remote { (1, limits::GAP_BYTES) } else { (BLOCK_BYTES, GAP_BYTES) };
            let gap_bytes = if leaves_gaps { 0 } else { gap_bytes };
            for shard in tensor.class.shards_of(rank).iter().filter(|shard| shard.rows.bytes() > 0) {
                let (begin, end) = (tensor.begin + shard.rows.begin, tensor.begin + shard.rows.end());
                let blocks = begin / block_bytes * block_bytes..end.next_multiple_of(block_bytes);
                by_any.add(tensor.source, &blocks, gap_bytes);
                if let Some(reads) = by_rank.get_mut(rank) {
                    reads.add(tensor.source, &blocks, gap_bytes);
                }
            }
        }
        let read: u64 = by_rank.iter().map(|reads| reads.bytes).sum();
        self.request.strategy == Strategy::Auto && read > by_any.bytes + by_any.bytes / EXCESS_DIVISOR
    }

    fn is_remote(&self, tensor: &Tensor) -> bool {
        self.checkpoint.source(tensor.source).is_ok_and(Source::is_remote)
    }

    /// Chooses a route for each tensor.
    fn choose_routes(&mut self, rules: RouteRules) {
        let mut routes: HashMap<RouteKey, Route> = HashMap::new();
        let mut choose = |tensor: &Tensor| {
            let is_remote = self.is_remote(tensor);
            let begin = if is_remote { 0 } else { tensor.begin % BLOCK_BYTES };
            let key = RouteKey { class: tensor.class.id, unit_bytes: tensor.unit_bytes, is_remote, begin };
            *routes.entry(key).or_insert_with(|| self.route(tensor, is_remote, rules))
        };
        let chosen: Vec<Route> = self.tensors.iter().map(&mut choose).collect();
        for (tensor, route) in self.tensors.iter_mut().zip(chosen) {
            tensor.route = route;
        }
    }

    fn route(&self, tensor: &Tensor, is_remote: bool, rules: RouteRules) -> Route {
        let class = &tensor.class;
        // Bytes that leave storage if every rank reads for itself: through each page cache, and past it.
        let (mut cached, mut uncached) = (vec![0; self.caches()], 0_u64);
        let mut is_cached = true;
        for shard in class.shards.iter().filter(|shard| shard.rows.bytes() > 0) {
            let touched = tensor.touched_bytes(&shard.rows, is_remote);
            uncached = uncached.saturating_add(touched);
            is_cached &=
                shard.rows.bytes() >= rules.cached_bytes_min && self.add_to_cache(&mut cached, shard.rank, touched);
        }
        let needed = class.requested_bytes;
        let through_caches = cached.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes.min(needed)));
        let has_one_reader = class.readers != Readers::Several;
        let is_own = |read: u64, needed: u64| match self.request.strategy {
            _ if has_one_reader && !rules.exchanges_single => true,
            Strategy::Own => true,
            // Requests for an object cover short gaps. If those are the shards of other ranks, bytes are requested twice.
            Strategy::Auto if is_remote && class.has_short_rows => false,
            Strategy::Auto => read <= needed.saturating_add(needed / EXCESS_DIVISOR),
            Strategy::Exchange => false,
        };
        // A page cache does not save the ranks the work on units of which each keeps only a part.
        let is_cached = is_cached && (!tensor.has_units() || is_own(uncached, class.kept_bytes));
        if is_cached && is_own(through_caches, needed) {
            Route::Cached
        } else if is_own(uncached, needed) {
            Route::Own
        } else if class.is_replicated {
            Route::Gather
        } else {
            Route::Exchange
        }
    }
}
