//! Plans for groups of ranks, and the part of one rank.

use super::calls::{answer, encode, parse};
use super::checkpoint::Checkpoint;
use super::ffi;
use super::guard::guard;
use super::ranks::{ExchangePlan, rank_range};
use super::selection::{Reads, Selection, Shards, spec};
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::selection;
use crate::error::{Error, Kind, Result};
use crate::load::views::Mappings;
use crate::ranks::load::{self, Collective, LoadRequest, Route, ShardRange, ShardRequest, Strategy};
use serde::Deserialize;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Plan that is identical on all ranks of a group.
#[derive(Clone)]
pub(super) struct LoadPlan {
    plan: Arc<load::LoadPlan>,
    mappings: Arc<Mappings>,
}

/// Reads, sends and receives of one rank.
pub(super) struct RankPlan {
    plan: LoadPlan,
    rank: usize,
    /// Index of the shard of a rank and an item in the selection of what this rank reads.
    region_indices: HashMap<(usize, usize), usize>,
}

/// Request for a plan, without the lists of shard requests.
#[derive(Deserialize)]
struct PlanRequest<'a> {
    /// Length of each list of shard requests.
    lengths: Vec<usize>,
    /// For each rank, the index of its list.
    list_of_rank: Vec<usize>,
    /// For each rank, the number of its page cache, or -1.
    caches: Vec<i64>,
    strategy: &'a str,
    window_bytes: i64,
}

/// Plans a load. `numbers` has the lists of shard requests, each as [`ShardRequest::decode`] takes it.
pub(super) fn plan_load(checkpoint: &Checkpoint, numbers: &[i64], request: &str) -> Result<Box<LoadPlan>> {
    guard(|| {
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        let PlanRequest { lengths, list_of_rank, caches, strategy, window_bytes } = parse(request)?;
        let strategy = match strategy {
            "auto" => Strategy::Auto,
            "own" => Strategy::Own,
            "exchange" => Strategy::Exchange,
            other => return Err(invalid(format!("strategy is {other:?}; give \"auto\", \"own\" or \"exchange\""))),
        };
        let window_bytes = u64::try_from(window_bytes)
            .map_err(|_| invalid(format!("window_bytes is {window_bytes}; it cannot be negative")))?;
        let files = checkpoint.files()?;
        let (mut layouts, mut rest) = (Vec::new(), numbers);
        let mut decode = |length: usize| {
            let missing = || invalid("a list of shard requests is shorter than its length".to_owned());
            let (list, after) = rest.split_at_checked(length).ok_or_else(missing)?;
            rest = after;
            ShardRequest::decode(list, files, &mut layouts)
        };
        let requests = lengths.into_iter().map(&mut decode).collect::<Result<_>>()?;
        let caches = caches.into_iter().map(|cache| u64::try_from(cache).ok()).collect();
        let request = LoadRequest { requests, layouts, list_of_rank, caches, strategy, window_bytes };
        let plan = Arc::new(load::LoadPlan::new(Arc::clone(files), request)?);
        Ok(Box::new(LoadPlan { plan, mappings: Arc::clone(checkpoint.mappings()) }))
    })
}

impl ExchangePlan for LoadPlan {
    fn ranks(&self) -> usize {
        self.plan.ranks()
    }

    fn windows(&self) -> usize {
        self.plan.windows()
    }

    fn traffic(&self, rank: usize, window: usize) -> (&'static str, Vec<u64>, Vec<u64>) {
        let collective = match self.plan.collective(window) {
            Collective::None => "none",
            Collective::Exchange => "exchange",
            Collective::Gather => "gather",
        };
        (collective, self.plan.outgoing(rank, window).splits, self.plan.incoming(rank, window).splits)
    }

    fn digest(&self) -> u64 {
        self.plan.digest()
    }
}

impl LoadPlan {
    /// Calls a method without tensors.
    pub(super) fn call(&self, method: &str, request: &str) -> Result<String> {
        let plan = &self.plan;
        answer(|_| match method {
            // Returns the indices of those requests of a rank whose tensors every rank takes from a page cache.
            "cached_items" => {
                let is_cached = |request: &ShardRequest| plan.route_of(request.tensor) == Some(Route::Cached);
                let requests = plan.requests(self.rank(parse(request)?)?).iter().enumerate();
                encode(&requests.filter(|(_, request)| is_cached(request)).map(|(item, _)| item).collect::<Vec<_>>())
            }
            // Returns the index and the number of the parts of the files that a rank compares with their digests before it
            // loads, or null if it compares the bytes that it loads.
            "part_to_verify" => encode(&plan.part_to_verify(self.rank(parse(request)?)?)),
            // Returns file, begin and end of each byte range that a rank reads in a window.
            "reads" => {
                let (rank, window) = parse(request)?;
                let reads = plan.reads(self.rank(rank)?, self.window(window)?).into_iter();
                encode(&reads.map(|(file, range)| (file, range.start, range.end)).collect::<Vec<_>>())
            }
            // Returns for each rank the bytes that it sends to others in a window, and for each those that it receives.
            "sent_bytes" => {
                let rows = plan.sent_bytes(self.window(parse(request)?)?);
                let mut received = vec![0; rows.len()];
                for row in &rows {
                    received.iter_mut().zip(row).for_each(|(sum, bytes)| *sum += bytes);
                }
                encode(&(rows.iter().map(|row| row.iter().sum()).collect::<Vec<u64>>(), received))
            }
            _ => self.call_plan(method, request),
        })
    }

    /// Selects some of a rank's shards, given the indices of its requests, for the rank to read without the others.
    pub(super) fn select_own(&self, rank: i64, items: &[i64]) -> Result<Box<Selection>> {
        guard(|| {
            let rank = self.rank(rank)?;
            let item_index = |&item: &i64| usize::try_from(item).unwrap_or(usize::MAX);
            let regions: Vec<_> =
                items.iter().map(|item| self.plan.region_of(rank, item_index(item))).collect::<Result<_>>()?;
            let ranks = self.plan.cached_ranks(rank);
            let shards = if ranks > 1 { Shards::Cached { ranks } } else { Shards::Own };
            Ok(self.select(regions.into(), shards))
        })
    }

    /// Selects regions that a rank reads.
    fn select(&self, regions: Arc<[TensorRegion]>, shards: Shards) -> Box<Selection> {
        let selection = selection::Selection::from_regions(self.plan.checkpoint(), regions);
        let reads = Reads::OfRank(Arc::clone(&self.plan), shards);
        Box::new(Selection::new(selection, Arc::clone(&self.mappings), reads))
    }
}

pub(super) fn plan_rank(plan: &LoadPlan, rank: i64) -> Result<ffi::RankLoad> {
    guard(|| {
        let rank = plan.rank(rank)?;
        let (mut regions, mut region_indices) = (Vec::new(), HashMap::new());
        for window in 0..plan.windows() {
            let outgoing = plan.plan.outgoing(rank, window);
            for shard_range in outgoing.local.iter().chain(outgoing.sends.iter().map(|(shard_range, _)| shard_range)) {
                if let Entry::Vacant(region_index) = region_indices.entry((shard_range.rank, shard_range.item)) {
                    region_index.insert(regions.len());
                    regions.push(plan.plan.region_of(shard_range.rank, shard_range.item)?);
                }
            }
        }
        let shards = (0..plan.plan.requests(rank).len()).map(|item| spec(&plan.plan.region_of(rank, item)?));
        Ok(ffi::RankLoad {
            shards: shards.collect::<Result<_>>()?,
            selection: plan.select(regions.into(), Shards::Exchanged),
            plan: Box::new(RankPlan { plan: plan.clone(), rank, region_indices }),
        })
    })
}

impl RankPlan {
    /// Returns what the rank reads in a window: bytes of its own shards, and bytes for others in the send buffer.
    pub(super) fn reads(&self, window: i64) -> Result<Vec<ffi::RankRange>> {
        guard(|| {
            let outgoing = self.plan.plan.outgoing(self.rank, self.plan.window(window)?);
            let own = outgoing.local.iter().map(|shard_range| (shard_range, None));
            let sends = outgoing.sends.iter().map(|(shard_range, offset)| (shard_range, Some(*offset)));
            let read = |(shard_range, offset): (&ShardRange, Option<u64>)| {
                let bytes = shard_range.begin..shard_range.end;
                Ok(rank_range(self.region_index(shard_range)?, shard_range.item, bytes, offset))
            };
            own.chain(sends).map(read).collect()
        })
    }

    /// Returns the bytes of the rank's shards in the receive buffer of a window.
    pub(super) fn receives(&self, window: i64) -> Result<Vec<ffi::RankRange>> {
        guard(|| {
            let incoming = self.plan.plan.incoming(self.rank, self.plan.window(window)?);
            let received =
                |(ShardRange { item, begin, end, .. }, offset)| rank_range(item, item, begin..end, Some(offset));
            Ok(incoming.shard_ranges.into_iter().map(received).collect())
        })
    }

    fn region_index(&self, shard_range: &ShardRange) -> Result<usize> {
        let missing = || Error::new(Kind::Internal, format!("{shard_range:?} is not in the selection"));
        self.region_indices.get(&(shard_range.rank, shard_range.item)).copied().ok_or_else(missing)
    }
}
