//! How ranks load a checkpoint together: who reads which bytes, and who gets
//! them from whom. Pure and the same on every rank: it is made of headers, of
//! what the ranks want and of nothing else.
//!
//! A tensor is *own* where every rank reads its share for itself. Otherwise
//! the ranks exchange it: all such tensors stand on a [`line`], each rank reads
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
mod line;
mod traffic;
mod want;
mod windows;

pub use self::line::Collective;
pub use self::traffic::{Incoming, Outgoing, Piece};
pub use self::want::{Share, Want};

use self::balance::{fill_up, split_evenly};
use self::line::Line;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{Region, Span, Wanted};
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
pub struct Request {
    /// The different lists of what a rank wants.
    pub wants: Vec<Vec<Want>>,
    /// Which of the lists is each rank's. As long as there are ranks.
    pub wants_of: Vec<usize>,
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
    request: Request,
    /// For each list of wants, whose it is.
    ranks_of: Vec<Vec<usize>>,
    /// The tensors that somebody wants, in the order of the files.
    tensors: Vec<Tensor>,
    /// For each tensor of the checkpoint its place among `tensors`.
    places: Vec<Option<usize>>,
    exchange: Line,
    gather: Line,
    /// For each rank what it reads for itself alone, in the order of the files.
    own: Vec<OnceLock<Vec<OwnShare>>>,
}

/// A share that its rank reads for itself alone.
#[derive(Clone, Copy, Debug)]
struct OwnShare {
    /// The tensor's place among those of the plan.
    tensor: usize,
    claim: Claim,
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
    claims: Vec<Claim>,
    way: Way,
    /// From the first byte of the file that is wanted to behind the last.
    hull: Range<u64>,
}

/// One want of one list.
#[derive(Clone, Copy, Debug)]
struct Claim {
    list: usize,
    item: usize,
}

/// How the bytes of a tensor come to those who want them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
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
    pub fn plan(checkpoint: Arc<Checkpoint>, request: Request) -> Result<Group> {
        let ranks = request.wants_of.len();
        if request.caches.len() != ranks {
            let message = format!("{ranks} ranks, but {} caches; give one for every rank", request.caches.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        let mut ranks_of = vec![Vec::new(); request.wants.len()];
        for (rank, &list) in request.wants_of.iter().enumerate() {
            let missing = || Error::new(Kind::InvalidArgument, format!("rank {rank} has no list of wants {list}"));
            ranks_of.get_mut(list).ok_or_else(missing)?.push(rank);
        }
        let mut places = vec![None; checkpoint.count()];
        let tensors = claimed(&checkpoint, &request, &ranks_of, &mut places)?;
        let (exchange, gather) = (Line::default(), Line::default());
        let own = vec![OnceLock::new(); ranks];
        let mut group = Group { checkpoint, request, ranks_of, tensors, places, exchange, gather, own };
        group.choose_ways()?;
        group.cut_lines();
        Ok(group)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.request.wants_of.len()
    }

    /// The checkpoint it is of.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// What a rank wants.
    pub fn wants(&self, rank: usize) -> &[Want] {
        let list = self.request.wants_of.get(rank).and_then(|&list| self.request.wants.get(list));
        list.map_or(&[], Vec::as_slice)
    }

    /// Whether every rank reads its share of the tensor with this position for itself.
    pub fn is_own(&self, position: usize) -> bool {
        let place = self.places.get(position).copied().flatten();
        place.and_then(|place| self.tensors.get(place)).is_none_or(|tensor| tensor.way == Way::Own)
    }

    /// The share of a rank, as what a load wants.
    ///
    /// # Errors
    /// `internal` where there is no such want.
    pub fn wanted(&self, rank: usize, item: usize) -> Result<Wanted> {
        let missing = || Error::new(Kind::Internal, format!("rank {rank} has no want {item}"));
        let want = self.wants(rank).get(item).ok_or_else(missing)?;
        let (source, entry) = self.checkpoint.entry(want.tensor).ok_or_else(missing)?;
        let whole = Wanted::whole(source, entry)?;
        let spans = want.share.spans(&whole.shape, rank, self.ranks());
        Wanted::part(source, entry, &spans)
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

    fn share(&self, claim: Claim) -> &Share {
        let want = self.request.wants.get(claim.list).and_then(|wants| wants.get(claim.item));
        want.map_or(&Share::Whole, |want| &want.share)
    }

    fn spans(&self, tensor: &Tensor, claim: Claim, rank: usize) -> Vec<Span> {
        self.share(claim).spans(&tensor.shape, rank, self.ranks())
    }

    fn region(&self, tensor: &Tensor, claim: Claim, rank: usize) -> Region {
        match self.share(claim) {
            Share::Whole => Region { begin: tensor.begin, row_bytes: tensor.bytes, repeats: Vec::new() },
            _ => Region::of(tensor.begin, tensor.item_bytes, &tensor.shape, &self.spans(tensor, claim, rank)),
        }
    }

    /// What a rank wants of a tensor.
    fn claims_of<'a>(&self, tensor: &'a Tensor, rank: usize) -> impl Iterator<Item = Claim> + use<'a> {
        let list = self.request.wants_of.get(rank).copied();
        // The claims are in the order of the lists, of which there may be as many as ranks.
        let first = tensor.claims.partition_point(|claim| Some(claim.list) < list);
        tensor.claims.iter().skip(first).copied().take_while(move |claim| Some(claim.list) == list)
    }

    /// What a rank reads for itself alone.
    fn own_shares(&self, rank: usize) -> &[OwnShare] {
        let find = || {
            let own = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.way == Way::Own);
            let shares = own.flat_map(|(place, tensor)| {
                let share =
                    move |claim| OwnShare { tensor: place, claim, bytes: self.region(tensor, claim, rank).bytes() };
                self.claims_of(tensor, rank).map(share)
            });
            shares.collect()
        };
        self.own.get(rank).map_or(&[], |own| own.get_or_init(find).as_slice())
    }

    /// Who wants what of a tensor.
    fn claimants<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (Claim, usize)> + 'a {
        tensor.claims.iter().flat_map(|&claim| {
            let ranks = self.ranks_of.get(claim.list).map_or(&[][..], Vec::as_slice);
            ranks.iter().map(move |&rank| (claim, rank))
        })
    }

    /// And where in the file: rank, item and rows.
    fn shares<'a>(&'a self, tensor: &'a Tensor) -> impl Iterator<Item = (usize, usize, Region)> + 'a {
        self.claimants(tensor).map(|(claim, rank)| (rank, claim.item, self.region(tensor, claim, rank)))
    }

    fn choose_ways(&mut self) -> Result<()> {
        let mut chosen = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            self.check_agreement(tensor)?;
            chosen.push(self.way(tensor));
        }
        for (tensor, (way, hull)) in self.tensors.iter_mut().zip(chosen) {
            (tensor.way, tensor.hull) = (way, hull);
        }
        Ok(())
    }

    fn way(&self, tensor: &Tensor) -> (Way, Range<u64>) {
        let whole = Region { begin: tensor.begin, row_bytes: tensor.bytes, repeats: Vec::new() };
        let (mut hull_begin, mut hull_end) = (u64::MAX, 0);
        // Bytes that leave storage if every rank reads for itself: what each cache is asked for, and the rest.
        let (mut cached, mut uncached) = (BTreeMap::new(), 0_u64);
        let (mut wanting, mut is_whole) = (vec![0_usize; self.ranks()], true);
        for (rank, _, region) in self.shares(tensor) {
            if region.bytes() == 0 {
                continue;
            }
            (hull_begin, hull_end) = (hull_begin.min(region.begin), hull_end.max(region.end()));
            is_whole &= region == whole;
            if let Some(count) = wanting.get_mut(rank) {
                *count += 1;
            }
            let touched = (region.end() - region.begin).min((region.row_bytes + BLOCK_BYTES) * region.rows());
            // What can be no view is read, and past the cache where it is not there yet.
            let is_view = region.repeats.is_empty() && region.begin.is_multiple_of(tensor.item_bytes);
            let sum = match self.request.caches.get(rank).copied().flatten().filter(|_| is_view) {
                Some(cache) => cached.entry(cache).or_insert(0),
                None => &mut uncached,
            };
            *sum = sum.saturating_add(touched);
        }
        let hull = hull_begin.min(hull_end)..hull_end;
        let span = hull.end - hull.start;
        let read = cached.values().fold(uncached, |sum, &bytes: &u64| sum.saturating_add(bytes.min(span)));
        let is_own = match self.request.strategy {
            Strategy::Own => true,
            Strategy::Auto => read <= span.saturating_add(span / EXCESS_DIVISOR),
            Strategy::Exchange => false,
        };
        let way = if is_own || wanting.iter().filter(|&&count| count > 0).count() < 2 {
            Way::Own
        } else if is_whole && wanting.iter().all(|&count| count == 1) {
            Way::Gather
        } else {
            Way::Exchange
        };
        (way, hull)
    }

    /// Ranks that lay out a tensor over the group must mean the same layout.
    fn check_agreement(&self, tensor: &Tensor) -> Result<()> {
        let mut first: Option<(usize, &Share)> = None;
        for claim in &tensor.claims {
            let rank = self.ranks_of.get(claim.list).and_then(|ranks| ranks.first());
            let (Some(&rank), share @ (Share::Whole | Share::Chunk { .. })) = (rank, self.share(*claim)) else {
                continue;
            };
            match first {
                Some((other, agreed)) if agreed != share => {
                    let message = format!(
                        "rank {other} wants {agreed} and rank {rank} {share}; all ranks that share a tensor need one \
                         layout"
                    );
                    return Err(self.at(tensor, Error::new(Kind::InvalidArgument, message)));
                }
                Some(_) => {}
                None => first = Some((rank, share)),
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
    fn cut_lines(&mut self) {
        let ranks = self.ranks();
        let mut loads = vec![0_u64; ranks];
        for tensor in self.tensors.iter().filter(|tensor| tensor.way == Way::Own) {
            for (rank, _, region) in self.shares(tensor) {
                if let Some(load) = loads.get_mut(rank) {
                    *load = load.saturating_add(region.bytes());
                }
            }
        }
        let mut gather = Line::of(&self.tensors, Way::Gather);
        let shares = split_evenly(gather.bytes(), ranks);
        for (load, share) in loads.iter_mut().zip(&shares) {
            *load = load.saturating_add(*share);
        }
        gather.cut(self.gather_cuts(&gather), &shares);
        let mut exchange = Line::of(&self.tensors, Way::Exchange);
        let shares = fill_up(&loads, exchange.bytes());
        exchange.cut(self.exchange_cuts(&exchange, &shares), &shares);
        (self.exchange, self.gather) = (exchange, gather);
    }
}

/// The tensors that somebody wants, in the order of the files.
fn claimed(
    checkpoint: &Checkpoint,
    request: &Request,
    ranks_of: &[Vec<usize>],
    places: &mut [Option<usize>],
) -> Result<Vec<Tensor>> {
    let mut claims: BTreeMap<usize, Vec<Claim>> = BTreeMap::new();
    for (list, wants) in request.wants.iter().enumerate() {
        if ranks_of.get(list).is_some_and(|ranks| !ranks.is_empty()) {
            for (item, want) in wants.iter().enumerate() {
                claims.entry(want.tensor).or_default().push(Claim { list, item });
            }
        }
    }
    let mut tensors = Vec::with_capacity(claims.len());
    for (position, claims) in claims {
        let missing = || Error::new(Kind::InvalidArgument, format!("the checkpoint has no tensor {position}"));
        let (source, entry) = checkpoint.entry(position).ok_or_else(missing)?;
        let shape = crate::checkpoint::region::torch_shape(entry)?;
        *places.get_mut(position).ok_or_else(missing)? = Some(tensors.len());
        tensors.push(Tensor {
            position,
            source,
            begin: entry.begin,
            bytes: entry.end.saturating_sub(entry.begin),
            item_bytes: entry.dtype.item_bytes(),
            shape,
            claims,
            way: Way::Own,
            hull: entry.begin..entry.begin,
        });
    }
    Ok(tensors)
}
