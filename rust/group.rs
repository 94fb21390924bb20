//! How ranks load a checkpoint together: who reads which bytes, and who gets
//! them from whom. Pure and the same on every rank: it is made of headers, of
//! what the ranks want and of nothing else.
//!
//! A tensor is *own* where every rank reads its share for itself. Otherwise
//! the ranks exchange it: all such tensors stand on a [`schedule`], each rank reads
//! a part of each window of the line, and then one collective brings everything
//! where it is wanted.
//!
//! ```text
//! line     [ a ][  b  ][ c ][     d     ][ e ]
//! windows  |----- 0 -----|----- 1 -----|-- 2 -..   so long that the buffers hold what is on its way
//! readers  | 0  | 1 | 2  | 0  | 1 | 2  | 0 ...     one part for each rank, balanced by bytes
//! ```
//!
//! What a rank keeps of a range of the file is a range of its share's own
//! contiguous bytes, so every piece on its way is two numbers.

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
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// What a disk reads at least: a row that is read alone may touch this much beside it.
const BLOCK_BYTES: u64 = 4096;
/// Reading this part more than once costs less than an exchange.
const EXCESS_DIVISOR: u64 = 16;

/// Who reads what more than one rank wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Each rank its own share where no byte is read twice by that, and one rank for all otherwise.
    Auto,
    /// Each rank its own share.
    Own,
    /// One rank for all.
    Exchange,
}

/// What a group is to load.
#[derive(Clone, Debug, Hash)]
pub struct GroupRequest {
    /// The different lists of what a rank wants.
    pub requests: Vec<Vec<ShardRequest>>,
    /// Which of the lists is each rank's. As long as there are ranks.
    pub list_of_rank: Vec<usize>,
    /// For each rank the page cache out of which it maps the files. What two ranks with the same one read leaves
    /// storage once. `None` where bytes are read past it, or where nobody else has it.
    pub caches: Vec<Option<u64>>,
    /// Who reads.
    pub strategy: Strategy,
    /// The most bytes of buffers that a rank has for what is on its way.
    pub window_bytes: u64,
}

/// A plan for a group.
#[derive(Debug)]
pub struct Group {
    checkpoint: Arc<Checkpoint>,
    request: GroupRequest,
    /// For each list of wants, whose it is.
    ranks_of: Vec<Vec<usize>>,
    /// The tensors that somebody wants, in the order of the files.
    tensors: Vec<Tensor>,
    /// For each tensor of the checkpoint its place among `tensors`.
    plan_indices: Vec<Option<usize>>,
    exchange: ExchangeSchedule,
    gather: ExchangeSchedule,
    /// For each rank what it reads for itself alone, in the order of the files.
    own: Vec<OnceLock<Vec<OwnShard>>>,
}

/// A share that its rank reads for itself alone.
#[derive(Clone, Copy, Debug)]
struct OwnShard {
    /// The tensor's place among those of the plan.
    tensor: usize,
    request_ref: RequestRef,
    bytes: u64,
}

/// A tensor that somebody wants a part of.
#[derive(Debug)]
struct Tensor {
    /// Its place in the checkpoint.
    position: usize,
    source: usize,
    /// Its first byte in the file.
    begin: u64,
    bytes: u64,
    item_bytes: u64,
    shape: Vec<u64>,
    /// Who wants it, in the order of the lists.
    request_refs: Vec<RequestRef>,
    route: Route,
    /// From the first byte of the file that is wanted to behind the last.
    hull: Range<u64>,
}

/// One want of one list.
#[derive(Clone, Copy, Debug)]
struct RequestRef {
    list: usize,
    item: usize,
}

/// How the bytes of a tensor come to those who want them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Own,
    Exchange,
    Gather,
}

impl Group {
    /// Plans a load.
    ///
    /// # Errors
    /// `invalid-argument` where wants do not fit the checkpoint, or ranks disagree about the layout of a tensor;
    /// `unsupported-dtype` where PyTorch cannot hold a tensor.
    pub fn plan(checkpoint: Arc<Checkpoint>, request: GroupRequest) -> Result<Group> {
        let ranks = request.list_of_rank.len();
        if request.caches.len() != ranks {
            let message = format!("{ranks} ranks, but {} caches; give one for every rank", request.caches.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        let mut ranks_of = vec![Vec::new(); request.requests.len()];
        for (rank, &list) in request.list_of_rank.iter().enumerate() {
            let missing = || Error::new(Kind::InvalidArgument, format!("rank {rank} has no list of wants {list}"));
            ranks_of.get_mut(list).ok_or_else(missing)?.push(rank);
        }
        let mut plan_indices = vec![None; checkpoint.count()];
        let tensors = requested_tensors(&checkpoint, &request, &ranks_of, &mut plan_indices)?;
        let (exchange, gather) = (ExchangeSchedule::default(), ExchangeSchedule::default());
        let own = vec![OnceLock::new(); ranks];
        let mut group = Group { checkpoint, request, ranks_of, tensors, plan_indices, exchange, gather, own };
        group.choose_routes()?;
        group.cut_schedules();
        Ok(group)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.request.list_of_rank.len()
    }

    /// The checkpoint it is of.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// What a rank wants.
    pub fn requests(&self, rank: usize) -> &[ShardRequest] {
        let list = self.request.list_of_rank.get(rank).and_then(|&list| self.request.requests.get(list));
        list.map_or(&[], Vec::as_slice)
    }

    /// Whether every rank reads its share of the tensor with this position for itself.
    pub fn is_own(&self, position: usize) -> bool {
        let plan_index = self.plan_indices.get(position).copied().flatten();
        plan_index.and_then(|plan_index| self.tensors.get(plan_index)).is_none_or(|tensor| tensor.route == Route::Own)
    }

    /// The share of a rank, as what a load wants.
    ///
    /// # Errors
    /// `internal` where there is no such want.
    pub fn region_of(&self, rank: usize, item: usize) -> Result<TensorRegion> {
        let missing = || Error::new(Kind::Internal, format!("rank {rank} has no want {item}"));
        let shard_request = self.requests(rank).get(item).ok_or_else(missing)?;
        let (source, entry) = self.checkpoint.entry(shard_request.tensor).ok_or_else(missing)?;
        let whole = TensorRegion::whole(source, entry)?;
        let index_ranges = shard_request.shard.index_ranges(&whole.shape, rank, self.ranks());
        TensorRegion::indexed(source, entry, &index_ranges)
    }

    /// A number that two ranks share if they have planned the same.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for source in self.checkpoint.sources() {
            (source.path.file_name(), source.length).hash(&mut hasher);
        }
        for (source, entry) in self.checkpoint.entries() {
            (source, entry.name, entry.dtype, entry.shape, entry.begin).hash(&mut hasher);
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
            Shard::Whole => StridedRange { begin: tensor.begin, row_bytes: tensor.bytes, strides: Vec::new() },
            _ => StridedRange::of(
                tensor.begin,
                tensor.item_bytes,
                &tensor.shape,
                &self.index_ranges(tensor, request_ref, rank),
            ),
        }
    }

    /// What a rank wants of a tensor.
    fn request_refs_of<'a>(&self, tensor: &'a Tensor, rank: usize) -> impl Iterator<Item = RequestRef> + use<'a> {
        let list = self.request.list_of_rank.get(rank).copied();
        // The claims are in the order of the lists, of which there may be as many as ranks.
        let first = tensor.request_refs.partition_point(|request_ref| Some(request_ref.list) < list);
        tensor.request_refs.iter().skip(first).copied().take_while(move |request_ref| Some(request_ref.list) == list)
    }

    /// What a rank reads for itself alone.
    fn own_shards(&self, rank: usize) -> &[OwnShard] {
        let find = || {
            let own = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.route == Route::Own);
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

    /// Who wants what of a tensor.
    fn requesters<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (RequestRef, usize)> + 'a {
        tensor.request_refs.iter().flat_map(|&request_ref| {
            let ranks = self.ranks_of.get(request_ref.list).map_or(&[][..], Vec::as_slice);
            ranks.iter().map(move |&rank| (request_ref, rank))
        })
    }

    /// And where in the file: rank, item and rows.
    fn shards<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (usize, usize, StridedRange)> + 'a {
        self.requesters(tensor)
            .map(|(request_ref, rank)| (rank, request_ref.item, self.range(tensor, request_ref, rank)))
    }

    fn choose_routes(&mut self) -> Result<()> {
        let mut chosen = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            self.check_agreement(tensor)?;
            chosen.push(self.route(tensor));
        }
        for (tensor, (route, hull)) in self.tensors.iter_mut().zip(chosen) {
            (tensor.route, tensor.hull) = (route, hull);
        }
        Ok(())
    }

    fn route(&self, tensor: &Tensor) -> (Route, Range<u64>) {
        let whole = StridedRange { begin: tensor.begin, row_bytes: tensor.bytes, strides: Vec::new() };
        let (mut hull_begin, mut hull_end) = (u64::MAX, 0);
        // Bytes that leave storage if every rank reads for itself: what each cache is asked for, and the rest.
        let (mut cached, mut uncached) = (BTreeMap::new(), 0_u64);
        let (mut wanting, mut is_whole) = (vec![0_usize; self.ranks()], true);
        for (rank, _, range) in self.shards(tensor) {
            if range.bytes() == 0 {
                continue;
            }
            (hull_begin, hull_end) = (hull_begin.min(range.begin), hull_end.max(range.end()));
            is_whole &= range == whole;
            if let Some(count) = wanting.get_mut(rank) {
                *count += 1;
            }
            let touched = (range.end() - range.begin).min((range.row_bytes + BLOCK_BYTES) * range.rows());
            // What can be no view is read, and past the cache where it is not there yet.
            let is_view = range.strides.is_empty() && range.begin.is_multiple_of(tensor.item_bytes);
            let sum = match self.request.caches.get(rank).copied().flatten().filter(|_| is_view) {
                Some(cache) => cached.entry(cache).or_insert(0),
                None => &mut uncached,
            };
            *sum = sum.saturating_add(touched);
        }
        let hull = hull_begin.min(hull_end)..hull_end;
        let hull_bytes = hull.end - hull.start;
        let read = cached.values().fold(uncached, |sum, &bytes: &u64| sum.saturating_add(bytes.min(hull_bytes)));
        let is_own = match self.request.strategy {
            Strategy::Own => true,
            Strategy::Auto => read <= hull_bytes.saturating_add(hull_bytes / EXCESS_DIVISOR),
            Strategy::Exchange => false,
        };
        let route = if is_own || wanting.iter().filter(|&&count| count > 0).count() < 2 {
            Route::Own
        } else if is_whole && wanting.iter().all(|&count| count == 1) {
            Route::Gather
        } else {
            Route::Exchange
        };
        (route, hull)
    }

    /// Ranks that lay out a tensor over the group must mean the same layout.
    fn check_agreement(&self, tensor: &Tensor) -> Result<()> {
        let mut first: Option<(usize, &Shard)> = None;
        for request_ref in &tensor.request_refs {
            let rank = self.ranks_of.get(request_ref.list).and_then(|ranks| ranks.first());
            let (Some(&rank), shard @ (Shard::Whole | Shard::Chunk { .. })) = (rank, self.shard(*request_ref)) else {
                continue;
            };
            match first {
                Some((other, agreed)) if agreed != shard => {
                    let message = format!(
                        "rank {other} wants {agreed} and rank {rank} {shard}; all ranks that share a tensor need one \
                         layout"
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
            Ok(source) => error.at(&source.path),
            Err(_) => error,
        }
    }

    /// Gives every rank its range of the lines, so that all read as many bytes, and cuts the ranges into windows.
    fn cut_schedules(&mut self) {
        let ranks = self.ranks();
        let mut loads = vec![0_u64; ranks];
        for tensor in self.tensors.iter().filter(|tensor| tensor.route == Route::Own) {
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
        gather.cut(self.gather_cuts(&gather), &rank_bytes);
        let mut exchange = ExchangeSchedule::of(&self.tensors, Route::Exchange);
        let rank_bytes = fill_up(&loads, exchange.bytes());
        exchange.cut(self.exchange_cuts(&exchange, &rank_bytes), &rank_bytes);
        (self.exchange, self.gather) = (exchange, gather);
    }
}

/// The tensors that somebody wants, in the order of the files.
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
        tensors.push(Tensor {
            position,
            source,
            begin: entry.begin,
            bytes: entry.end.saturating_sub(entry.begin),
            item_bytes: entry.dtype.item_bytes(),
            shape,
            request_refs,
            route: Route::Own,
            hull: entry.begin..entry.begin,
        });
    }
    Ok(tensors)
}
