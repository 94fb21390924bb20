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
mod classes;
mod routes;
mod schedule;
mod shard;
mod traffic;
mod windows;

pub use self::routes::Route;
pub use self::schedule::Collective;
pub use self::shard::{Shard, ShardRequest};
pub use self::traffic::{Incoming, Outgoing, ShardRange};

use self::balance::{fill_up, split_evenly};
use self::classes::{Class, ClassKey, ClassShard};
use self::routes::EXCESS_DIVISOR;
use self::schedule::ExchangeSchedule;
use super::mesh::MeshLayout;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{TensorRegion, torch_shape};
use crate::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

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
pub struct LoadRequest {
    /// Distinct request lists.
    pub requests: Vec<Vec<ShardRequest>>,
    /// Mesh layouts that the requests refer to.
    pub layouts: Vec<MeshLayout>,
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
pub struct LoadPlan {
    checkpoint: Arc<Checkpoint>,
    request: LoadRequest,
    /// For each rank, the number of its page cache, counted from 0 in the order of ranks.
    cache_numbers: Vec<Option<usize>>,
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
    /// Index into the shards of the rank of the tensor's class.
    shard: usize,
    /// Index of the request of the rank.
    item: usize,
    bytes: u64,
}

/// Requested tensor.
#[derive(Debug)]
struct Tensor {
    source: usize,
    /// First byte in the file.
    begin: u64,
    bytes: u64,
    item_bytes: u64,
    /// Size of the parts that should have one reader, in bytes from the start of the tensor: units of the file, or
    /// elements if it has none.
    unit_bytes: u64,
    class: Arc<Class>,
    /// For each request of the class, its index in its list.
    items: Vec<usize>,
    route: Route,
    /// File range from the first requested byte to the end of the last.
    hull: Range<u64>,
}

impl Tensor {
    /// Returns the index of a request for the tensor in the list of its rank.
    fn item_of(&self, shard: &ClassShard) -> usize {
        self.items.get(shard.request).copied().unwrap_or(usize::MAX)
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
}

impl LoadPlan {
    /// Plans a load. Fails with `invalid-argument` if requests do not fit the checkpoint, ranks disagree about a
    /// tensor's layout, or `window_bytes` is so small that the plan would have too many windows; `unsupported-dtype` if
    /// PyTorch has no dtype for a tensor.
    pub fn new(checkpoint: Arc<Checkpoint>, request: LoadRequest) -> Result<LoadPlan> {
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
        let mut numbers = HashMap::new();
        let mut number = |cache: u64| {
            let next = numbers.len();
            *numbers.entry(cache).or_insert(next)
        };
        let cache_numbers = request.caches.iter().map(|cache| cache.map(&mut number)).collect();
        let (exchange, gather) = (ExchangeSchedule::default(), ExchangeSchedule::default());
        let own = vec![OnceLock::new(); ranks];
        let verifies_first = false;
        let mut group = LoadPlan {
            checkpoint,
            request,
            cache_numbers,
            tensors,
            plan_indices,
            exchange,
            gather,
            own,
            verifies_first,
        };
        group.decide_routes();
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

    /// Returns the number of ranks that read through the page cache of this rank, itself included.
    pub fn cached_ranks(&self, rank: usize) -> usize {
        let Some(cache) = self.cache_of(rank) else { return 1 };
        self.request.caches.iter().filter(|&&other| other == Some(cache)).count()
    }

    /// Returns whether bytes between the bytes that a rank reads belong to other ranks: the ranks request all data between
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
    pub fn region_of(&self, rank: usize, item: usize) -> Result<TensorRegion> {
        let missing = || Error::new(Kind::InvalidArgument, format!("rank {rank} has no request {item}"));
        let shard_request = self.requests(rank).get(item).ok_or_else(missing)?;
        let (source, entry) = self.checkpoint.entry(shard_request.tensor).ok_or_else(missing)?;
        let whole = TensorRegion::whole(source, entry)?;
        let layouts = &self.request.layouts;
        let index_ranges = shard_request.shard.index_ranges(layouts, &whole.shape, rank, self.ranks())?;
        TensorRegion::indexed(source, entry, &index_ranges)
    }

    /// Returns a hash that is equal on two ranks if their plans are equal.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for source in self.checkpoint.sources() {
            (source.path().file_name(), source.length()).hash(&mut hasher);
        }
        self.checkpoint.saves().hash(&mut hasher);
        for (source, entry) in self.checkpoint.entries() {
            (source, entry.name, entry.dtype, entry.shape, entry.begin).hash(&mut hasher);
        }
        for tensor in &self.tensors {
            tensor.unit_bytes.hash(&mut hasher);
        }
        self.request.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the shards that a rank reads for itself.
    fn own_shards(&self, rank: usize) -> &[OwnShard] {
        let find = || {
            let own = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.route.is_own());
            let shards = own.flat_map(|(plan_index, tensor)| {
                let found = tensor.class.shards_of(rank).iter().enumerate();
                found.map(move |(index, shard)| OwnShard {
                    tensor: plan_index,
                    shard: index,
                    item: tensor.item_of(shard),
                    bytes: shard.rows.bytes(),
                })
            });
            shards.collect()
        };
        self.own.get(rank).map_or(&[], |own| own.get_or_init(find).as_slice())
    }

    /// Returns the classes of the tensors that match, each with their number.
    fn classes(&self, matches: impl Fn(&Tensor) -> bool) -> impl Iterator<Item = (&Class, u64)> {
        let mut counts: HashMap<usize, (&Class, u64)> = HashMap::new();
        for tensor in self.tensors.iter().filter(|tensor| matches(tensor)) {
            counts.entry(tensor.class.id).or_insert((&tensor.class, 0)).1 += 1;
        }
        counts.into_values()
    }

    /// Lets ranks divide the units of exchanged tensors that would take much of the buffers of a window.
    fn divide_large_units(&mut self) {
        let room = self.exchange_room();
        let is_large = |tensor: &Tensor| {
            tensor.route == Route::Exchange && 2 * tensor.unit_bytes_max() * tensor.class.copies_max > room
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
        for (class, count) in self.classes(|tensor| tensor.route.is_own()) {
            for shard in &class.shards {
                if let Some(load) = loads.get_mut(shard.rank) {
                    *load = load.saturating_add(shard.rows.bytes().saturating_mul(count));
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

/// Collects the requested tensors, in file order.
fn requested_tensors(
    checkpoint: &Checkpoint,
    request: &LoadRequest,
    ranks_of: &[Vec<usize>],
    plan_indices: &mut [Option<usize>],
) -> Result<Vec<Tensor>> {
    let missing = || Error::new(Kind::InvalidArgument, "a request is for a tensor that the checkpoint does not have");
    // For each tensor of the checkpoint its requests, in the order of the lists: list, index in the list, and shard.
    let mut requested: Vec<Vec<(usize, usize, &Shard)>> = vec![Vec::new(); checkpoint.count()];
    for (list, requests) in request.requests.iter().enumerate() {
        if ranks_of.get(list).is_some_and(|ranks| !ranks.is_empty()) {
            for (item, ShardRequest { tensor, shard }) in requests.iter().enumerate() {
                requested.get_mut(*tensor).ok_or_else(missing)?.push((list, item, shard));
            }
        }
    }
    let mut classes: HashMap<ClassKey<'_>, Arc<Class>> = HashMap::new();
    let mut tensors = Vec::with_capacity(checkpoint.count());
    for (((source, entry), requests), plan_index) in checkpoint.entries().zip(requested).zip(plan_indices) {
        if requests.is_empty() {
            continue;
        }
        *plan_index = Some(tensors.len());
        let item_bytes = entry.dtype.item_bytes();
        let bytes = entry.end.saturating_sub(entry.begin);
        let unit_bytes = checkpoint.source_in_groups(source).and_then(|source| source.unit_bytes(entry.begin));
        let shards = requests.iter().map(|&(list, _, shard)| (list, shard)).collect();
        let key = ClassKey { shape: torch_shape(entry)?, item_bytes, bytes, shards };
        let class = match classes.get(&key) {
            Some(class) => Arc::clone(class),
            None => {
                let class = Class::of(classes.len(), &key, request, ranks_of);
                let class = class.map_err(|error| checkpoint.locate(source, error.tensor(entry.name)))?;
                Arc::clone(classes.entry(key).or_insert(Arc::new(class)))
            }
        };
        tensors.push(Tensor {
            source,
            begin: entry.begin,
            bytes,
            item_bytes,
            unit_bytes: unit_bytes.filter(|bytes| bytes.is_multiple_of(item_bytes)).unwrap_or(item_bytes),
            hull: entry.begin + class.hull.start..entry.begin + class.hull.end,
            class,
            items: requests.into_iter().map(|(_, item, _)| item).collect(),
            route: Route::Own,
        });
    }
    Ok(tensors)
}
