//! Plan of a load by a group of ranks: which rank reads which bytes, and which
//! ranks receive them. Pure, and equal on every rank: the only inputs are headers
//! and the requests of all ranks.
//!
//! The route of a tensor is *own* if every rank reads its shard itself, and *cached*
//! if it does so through a page cache that the ranks share. All other tensors are
//! exchanged. They form a [`schedule`] that is divided into windows. Each rank reads
//! a part of each window, and one collective distributes it.
//!
//! ```text
//! schedule [ a ][  b  ][ c ][     d     ][ e ]
//! windows  |----- 0 -----|----- 1 -----|-- 2 -..   sized so that data in flight fit the buffers
//! readers  | 0  | 1 | 2  | 0  | 1 | 2  | 0 ...     one part for each rank, balanced by bytes
//! ```
//!
//! The bytes of a file range that a rank keeps are one range of its shard's
//! contiguous form, so two numbers describe each transferred range.

mod balance;
mod schedule;
mod shard;
mod traffic;
mod windows;

pub use self::schedule::Collective;
pub use self::shard::{Shard, ShardRequest};
pub use self::traffic::{Incoming, Outgoing, ShardRange};

use self::balance::{fill_up, split_evenly};
use self::schedule::ExchangeSchedule;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{IndexRange, StridedRange, TensorRegion, torch_shape};
use crate::error::{Error, Kind, Result};
use crate::plan::GAP_BYTES;
use crate::remote::limits;
use crate::source::Source;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Largest alignment of reads past the page cache, in bytes. A row that is read alone may cost this much extra.
const BLOCK_BYTES: u64 = 4096;
/// Reading up to 1/16 of the bytes more than once costs less than an exchange.
const EXCESS_DIVISOR: u64 = 16;
/// Smallest shard that a rank takes from the page cache if the load exchanges other tensors, in bytes. The kernel reads
/// megabytes around a page, and with small shards those would be bytes that other ranks read to send them.
const CACHED_BYTES_MIN: u64 = 1 << 20;

/// Method by which data needed by several ranks is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Each rank reads its own shard if no byte is read twice by that; otherwise the ranks exchange.
    Auto,
    /// Each rank reads its own shard.
    Own,
    /// One rank reads each byte and sends it to the others.
    Exchange,
}

/// Requests of all ranks of a group.
#[derive(Clone, Debug, Hash)]
pub struct GroupRequest {
    /// Distinct request lists.
    pub requests: Vec<Vec<ShardRequest>>,
    /// For each rank, the index of its list in `requests`.
    pub list_of_rank: Vec<usize>,
    /// For each rank, the page cache that serves its files. Bytes that two ranks read through the same page cache leave
    /// storage once. `None` for reads that bypass the page cache.
    pub caches: Vec<Option<u64>>,
    /// Reading strategy.
    pub strategy: Strategy,
    /// Largest size of a rank's send and receive buffers together, in bytes.
    pub window_bytes: u64,
}

/// Plan of a load by a group.
#[derive(Debug)]
pub struct Group {
    checkpoint: Arc<Checkpoint>,
    request: GroupRequest,
    /// For each request list, its ranks.
    ranks_of: Vec<Vec<usize>>,
    /// Requested tensors, in file order.
    tensors: Vec<Tensor>,
    /// For each tensor of the checkpoint, its index in `tensors`.
    plan_indices: Vec<Option<usize>>,
    exchange: ExchangeSchedule,
    gather: ExchangeSchedule,
    /// For each rank, the shards it reads for itself, in file order. Computed on first use.
    own: Vec<OnceLock<Vec<OwnShard>>>,
    /// Whether the ranks of each page cache verify the files before they load.
    verifies_first: bool,
}

/// Shard that its rank reads for itself.
#[derive(Clone, Copy, Debug)]
struct OwnShard {
    /// Index into the tensors of the plan.
    tensor: usize,
    request_ref: RequestRef,
    bytes: u64,
}

/// Requested tensor.
#[derive(Debug)]
struct Tensor {
    /// Index in the checkpoint.
    position: usize,
    source: usize,
    /// First byte in the file.
    begin: u64,
    bytes: u64,
    item_bytes: u64,
    /// Size of the parts that should have one reader, in bytes from the start of the tensor: units of the file, or
    /// elements if it has none.
    unit_bytes: u64,
    shape: Vec<u64>,
    /// Requests for the tensor, in the order of the lists.
    request_refs: Vec<RequestRef>,
    route: Route,
    /// File range from the first requested byte to the end of the last.
    hull: Range<u64>,
}

impl Tensor {
    /// Returns the bytes of the whole tensor: none, if it is stored without data.
    fn whole(&self) -> StridedRange {
        StridedRange { begin: self.begin, row_bytes: self.bytes, strides: Vec::new() }
    }

    /// Returns whether a reader needs whole units of several elements.
    fn has_units(&self) -> bool {
        self.unit_bytes > self.item_bytes
    }

    /// Returns the requested bytes of the unit with the byte at `at` of the file.
    fn unit_at(&self, at: u64) -> Range<u64> {
        let begin = at - (at - self.begin) % self.unit_bytes;
        begin.max(self.hull.start)..begin.saturating_add(self.unit_bytes).min(self.hull.end)
    }

    /// Returns an upper bound of the requested bytes of a unit, or zero if a reader does not need whole units.
    fn unit_bytes_max(&self) -> u64 {
        if self.has_units() { self.unit_bytes.min(self.hull.end - self.hull.start) } else { 0 }
    }

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

/// Reference to one request of one list.
#[derive(Clone, Copy, Debug)]
struct RequestRef {
    list: usize,
    item: usize,
}

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
    fn is_own(self) -> bool {
        matches!(self, Route::Own | Route::Cached)
    }
}

impl Group {
    /// Plans a load.
    ///
    /// # Errors
    /// `invalid-argument` if requests do not fit the checkpoint, ranks disagree about a tensor's layout, or
    /// `window_bytes` is so small that the plan would have too many windows;
    /// `unsupported-dtype` if PyTorch has no dtype for a tensor.
    pub fn plan(checkpoint: Arc<Checkpoint>, request: GroupRequest) -> Result<Group> {
        let ranks = request.list_of_rank.len();
        if request.caches.len() != ranks {
            let message = format!("{ranks} ranks, but {} page caches; pass one for each rank", request.caches.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        let mut ranks_of = vec![Vec::new(); request.requests.len()];
        for (rank, &list) in request.list_of_rank.iter().enumerate() {
            let missing = || {
                Error::new(
                    Kind::InvalidArgument,
                    format!("rank {rank} refers to request list {list}, which does not exist"),
                )
            };
            ranks_of.get_mut(list).ok_or_else(missing)?.push(rank);
        }
        let mut plan_indices = vec![None; checkpoint.count()];
        let tensors = requested_tensors(&checkpoint, &request, &ranks_of, &mut plan_indices)?;
        let (exchange, gather) = (ExchangeSchedule::default(), ExchangeSchedule::default());
        let own = vec![OnceLock::new(); ranks];
        let verifies_first = false;
        let mut group =
            Group { checkpoint, request, ranks_of, tensors, plan_indices, exchange, gather, own, verifies_first };
        group.check_layouts()?;
        if group.tensors.iter().any(Tensor::has_units) {
            group.decide_what_verifies();
        }
        let mut rules = RouteRules::default();
        group.choose_routes(rules);
        if group.reads_blocks_again() {
            rules.exchanges_single = true;
            group.choose_routes(rules);
        }
        if group.tensors.iter().any(|tensor| !tensor.route.is_own()) {
            rules.cached_bytes_min = CACHED_BYTES_MIN;
            group.choose_routes(rules);
        }
        group.cut_schedules()?;
        Ok(group)
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.request.list_of_rank.len()
    }

    /// Returns the checkpoint of the plan.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// Returns the requests of a rank.
    pub fn requests(&self, rank: usize) -> &[ShardRequest] {
        let list = self.request.list_of_rank.get(rank).and_then(|&list| self.request.requests.get(list));
        list.map_or(&[], Vec::as_slice)
    }

    /// Returns the route of the tensor at this index of the checkpoint, or `None` if no rank requests the tensor.
    pub fn route_of(&self, position: usize) -> Option<Route> {
        let plan_index = self.plan_indices.get(position).copied().flatten();
        plan_index.and_then(|plan_index| self.tensors.get(plan_index)).map(|tensor| tensor.route)
    }

    /// Returns whether another rank reads through the page cache of this rank.
    pub fn shares_cache(&self, rank: usize) -> bool {
        let Some(cache) = self.cache_of(rank) else { return false };
        self.request.caches.iter().filter(|&&other| other == Some(cache)).count() > 1
    }

    /// Returns whether bytes between those that a rank reads are those of other ranks: the ranks request all data between
    /// them, or all but a sixteenth.
    pub fn leaves_gaps(&self) -> bool {
        let requested: u64 = self.tensors.iter().map(|tensor| tensor.hull.end - tensor.hull.start).sum();
        requested >= self.all_bytes() - self.all_bytes() / EXCESS_DIVISOR
    }

    /// Returns the size of all data of the files.
    fn all_bytes(&self) -> u64 {
        self.checkpoint.entries().map(|(_, entry)| entry.end - entry.begin).sum()
    }

    fn cache_of(&self, rank: usize) -> Option<u64> {
        self.request.caches.get(rank).copied().flatten()
    }

    /// Returns the part of the files that a rank compares with their digests before it loads, as its index and the number
    /// of parts, or `None` if it compares the bytes that it loads.
    ///
    /// Ranks that share a page cache, and keep the files between them, divide the files: none hashes a byte that another
    /// has hashed. The shards are views of the same memory for all of them.
    pub fn part_to_verify(&self, rank: usize) -> Option<(usize, usize)> {
        let cache = self.cache_of(rank).filter(|_| self.verifies_first)?;
        let sharing: Vec<usize> = (0..self.ranks()).filter(|&other| self.cache_of(other) == Some(cache)).collect();
        Some((sharing.iter().position(|&other| other == rank)?, sharing.len()))
    }

    /// Returns the region of a rank's shard, as a load takes it.
    ///
    /// # Errors
    /// `internal` if the request does not exist.
    pub fn region_of(&self, rank: usize, item: usize) -> Result<TensorRegion> {
        let missing = || Error::new(Kind::Internal, format!("rank {rank} has no request {item}"));
        let shard_request = self.requests(rank).get(item).ok_or_else(missing)?;
        let (source, entry) = self.checkpoint.entry(shard_request.tensor).ok_or_else(missing)?;
        let whole = TensorRegion::whole(source, entry)?;
        let index_ranges = shard_request.shard.index_ranges(&whole.shape, rank, self.ranks());
        TensorRegion::indexed(source, entry, &index_ranges)
    }

    /// Returns a hash that is equal on two ranks if their plans are equal.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for source in self.checkpoint.sources() {
            (source.path().file_name(), source.length()).hash(&mut hasher);
        }
        for (source, entry) in self.checkpoint.entries() {
            (source, entry.name, entry.dtype, entry.shape, entry.begin).hash(&mut hasher);
        }
        for tensor in &self.tensors {
            tensor.unit_bytes.hash(&mut hasher);
        }
        self.request.hash(&mut hasher);
        hasher.finish()
    }

    fn shard(&self, request_ref: RequestRef) -> &Shard {
        let shard_request =
            self.request.requests.get(request_ref.list).and_then(|requests| requests.get(request_ref.item));
        shard_request.map_or(&Shard::Whole, |shard_request| &shard_request.shard)
    }

    fn index_ranges(&self, tensor: &Tensor, request_ref: RequestRef, rank: usize) -> Vec<IndexRange> {
        self.shard(request_ref).index_ranges(&tensor.shape, rank, self.ranks())
    }

    fn range(&self, tensor: &Tensor, request_ref: RequestRef, rank: usize) -> StridedRange {
        match self.shard(request_ref) {
            _ if tensor.bytes == 0 => tensor.whole(),
            Shard::Whole => tensor.whole(),
            _ => StridedRange::of(
                tensor.begin,
                tensor.item_bytes,
                &tensor.shape,
                &self.index_ranges(tensor, request_ref, rank),
            ),
        }
    }

    /// Returns the requests of a rank for a tensor.
    fn request_refs_of<'a>(&self, tensor: &'a Tensor, rank: usize) -> impl Iterator<Item = RequestRef> + use<'a> {
        let list = self.request.list_of_rank.get(rank).copied();
        // Requests are sorted by list. There may be as many lists as ranks, so a binary search finds the first.
        let first = tensor.request_refs.partition_point(|request_ref| Some(request_ref.list) < list);
        tensor.request_refs.iter().skip(first).copied().take_while(move |request_ref| Some(request_ref.list) == list)
    }

    /// Returns the shards that a rank reads for itself.
    fn own_shards(&self, rank: usize) -> &[OwnShard] {
        let find = || {
            let own = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.route.is_own());
            let shards = own.flat_map(|(plan_index, tensor)| {
                let shard = move |request_ref| OwnShard {
                    tensor: plan_index,
                    request_ref,
                    bytes: self.range(tensor, request_ref, rank).bytes(),
                };
                self.request_refs_of(tensor, rank).map(shard)
            });
            shards.collect()
        };
        self.own.get(rank).map_or(&[], |own| own.get_or_init(find).as_slice())
    }

    /// Returns the requests for a tensor, each with its rank.
    fn requesters<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (RequestRef, usize)> + 'a {
        tensor.request_refs.iter().flat_map(|&request_ref| {
            let ranks = self.ranks_of.get(request_ref.list).map_or(&[][..], Vec::as_slice);
            ranks.iter().map(move |&rank| (request_ref, rank))
        })
    }

    /// Returns the shards of a tensor: rank, index of the request, and rows in the file.
    fn shards<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (usize, usize, StridedRange)> + 'a {
        self.requesters(tensor)
            .map(|(request_ref, rank)| (rank, request_ref.item, self.range(tensor, request_ref, rank)))
    }

    fn check_layouts(&self) -> Result<()> {
        self.tensors.iter().try_for_each(|tensor| self.check_layout(tensor))
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

    /// Checks that all ranks that shard a tensor over the group use the same layout.
    fn check_layout(&self, tensor: &Tensor) -> Result<()> {
        let mut first: Option<(usize, &Shard)> = None;
        for request_ref in &tensor.request_refs {
            let rank = self.ranks_of.get(request_ref.list).and_then(|ranks| ranks.first());
            let (Some(&rank), shard @ (Shard::Whole | Shard::Chunk { .. })) = (rank, self.shard(*request_ref)) else {
                continue;
            };
            match first {
                Some((other, agreed)) if agreed != shard => {
                    let message = format!(
                        "rank {other} requests {agreed} and rank {rank} requests {shard}; pass the same layout on all \
                         ranks"
                    );
                    return Err(self.at(tensor, Error::new(Kind::InvalidArgument, message)));
                }
                Some(_) => {}
                None => first = Some((rank, shard)),
            }
        }
        Ok(())
    }

    fn at(&self, tensor: &Tensor, error: Error) -> Error {
        let error = match self.checkpoint.entry(tensor.position) {
            Some((_, entry)) => error.tensor(entry.name),
            None => error,
        };
        match self.checkpoint.source(tensor.source) {
            Ok(source) => error.at(source.path()),
            Err(_) => error,
        }
    }

    /// Lets ranks divide the units of exchanged tensors that would take much of the buffers of a window.
    fn divide_large_units(&mut self) {
        let room = self.exchange_room();
        let is_large = |tensor: &Tensor| {
            tensor.route == Route::Exchange && 2 * tensor.unit_bytes_max() * self.copies_max(tensor) > room
        };
        let are_large: Vec<bool> = self.tensors.iter().map(is_large).collect();
        for (tensor, _) in self.tensors.iter_mut().zip(are_large).filter(|(_, is_large)| *is_large) {
            tensor.unit_bytes = tensor.item_bytes;
        }
    }

    /// Assigns every rank its part of the schedules, so that all ranks read equally many bytes, and divides them into
    /// windows.
    fn cut_schedules(&mut self) -> Result<()> {
        let ranks = self.ranks();
        let mut loads = vec![0_u64; ranks];
        for tensor in self.tensors.iter().filter(|tensor| tensor.route.is_own()) {
            for (rank, _, range) in self.shards(tensor) {
                if let Some(load) = loads.get_mut(rank) {
                    *load = load.saturating_add(range.bytes());
                }
            }
        }
        let mut gather = ExchangeSchedule::of(&self.tensors, Route::Gather);
        let rank_bytes = split_evenly(gather.bytes(), ranks);
        for (load, bytes) in loads.iter_mut().zip(&rank_bytes) {
            *load = load.saturating_add(*bytes);
        }
        let (cuts, slices) = self.gather_cuts(&gather)?;
        gather.cut(cuts, slices, &rank_bytes);
        self.divide_large_units();
        let mut exchange = ExchangeSchedule::of(&self.tensors, Route::Exchange);
        let rank_bytes = fill_up(&loads, exchange.bytes());
        exchange.cut(self.exchange_cuts(&exchange, &rank_bytes)?, 1, &rank_bytes);
        (self.exchange, self.gather) = (exchange, gather);
        Ok(())
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

/// Collects the requested tensors, in file order.
fn requested_tensors(
    checkpoint: &Checkpoint,
    request: &GroupRequest,
    ranks_of: &[Vec<usize>],
    plan_indices: &mut [Option<usize>],
) -> Result<Vec<Tensor>> {
    let mut request_refs: BTreeMap<usize, Vec<RequestRef>> = BTreeMap::new();
    for (list, requests) in request.requests.iter().enumerate() {
        if ranks_of.get(list).is_some_and(|ranks| !ranks.is_empty()) {
            for (item, shard_request) in requests.iter().enumerate() {
                request_refs.entry(shard_request.tensor).or_default().push(RequestRef { list, item });
            }
        }
    }
    let mut tensors = Vec::with_capacity(request_refs.len());
    for (position, request_refs) in request_refs {
        let missing = || Error::new(Kind::InvalidArgument, format!("the checkpoint has no tensor {position}"));
        let (source, entry) = checkpoint.entry(position).ok_or_else(missing)?;
        let shape = torch_shape(entry)?;
        *plan_indices.get_mut(position).ok_or_else(missing)? = Some(tensors.len());
        let item_bytes = entry.dtype.item_bytes();
        let unit_bytes = checkpoint.source_in_groups(source).and_then(|source| source.unit_bytes(entry.begin));
        tensors.push(Tensor {
            position,
            source,
            begin: entry.begin,
            bytes: entry.end.saturating_sub(entry.begin),
            item_bytes,
            unit_bytes: unit_bytes.filter(|bytes| bytes.is_multiple_of(item_bytes)).unwrap_or(item_bytes),
            shape,
            request_refs,
            route: Route::Own,
            hull: entry.begin..entry.begin,
        });
    }
    Ok(tensors)
}
