//! Plans for groups of ranks, and the part of one rank.

use super::checkpoint::Checkpoint;
use super::ffi;
use super::guard::guard;
use super::selection::{Reads, Recording, Selection, Shards, spec};
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::selection;
use crate::error::{Error, Kind, Result};
use crate::group::{Collective, Group, GroupRequest, Route, ShardRange, ShardRequest, Strategy};
use crate::load::views::Mappings;
use crate::num::to_u64;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Plan that is identical on all ranks of a group.
pub(super) struct GroupPlan {
    group: Arc<Group>,
    mappings: Arc<Mappings>,
}

/// Reads, sends and receives of one rank.
pub(super) struct RankPlan {
    group: Arc<Group>,
    mappings: Arc<Mappings>,
    rank: usize,
    /// Shards of any rank from which this rank reads bytes.
    regions: Arc<[TensorRegion]>,
    /// Index in `regions` of the shard of a rank and an item.
    region_indices: HashMap<(usize, usize), usize>,
}

pub(super) fn plan_group(
    checkpoint: &Checkpoint,
    requests: &[ffi::ShardRequests],
    list_of_rank: &[i64],
    caches: &[i64],
    strategy: &str,
    window_bytes: i64,
) -> Result<Box<GroupPlan>> {
    guard(|| {
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        let strategy = match strategy {
            "auto" => Strategy::Auto,
            "own" => Strategy::Own,
            "exchange" => Strategy::Exchange,
            other => return Err(invalid(format!("strategy is {other:?}; give \"auto\", \"own\" or \"exchange\""))),
        };
        let window_bytes = u64::try_from(window_bytes)
            .map_err(|_| invalid(format!("window_bytes is {window_bytes}; it cannot be negative")))?;
        let files = checkpoint.files();
        let list_index = |&list: &i64| usize::try_from(list).unwrap_or(usize::MAX);
        let mut layouts = Vec::new();
        let mut decode = |list: &ffi::ShardRequests| ShardRequest::decode(&list.numbers, files, &mut layouts);
        let requests = requests.iter().map(&mut decode).collect::<Result<_>>()?;
        let request = GroupRequest {
            requests,
            layouts,
            list_of_rank: list_of_rank.iter().map(list_index).collect(),
            caches: caches.iter().map(|&cache| u64::try_from(cache).ok()).collect(),
            strategy,
            window_bytes,
        };
        let group = Arc::new(Group::plan(Arc::clone(files), request)?);
        Ok(Box::new(GroupPlan { group, mappings: Arc::clone(checkpoint.mappings()) }))
    })
}

impl GroupPlan {
    pub(super) fn ranks(&self) -> usize {
        self.group.ranks()
    }

    pub(super) fn windows(&self) -> usize {
        self.group.windows()
    }

    pub(super) fn collective(&self, window: usize) -> &str {
        match self.group.collective(window) {
            Collective::None => "none",
            Collective::Exchange => "exchange",
            Collective::Gather => "gather",
        }
    }

    pub(super) fn send_splits(&self, rank: usize, window: usize) -> Vec<i64> {
        self.group.outgoing(rank, window).splits.into_iter().map(signed).collect()
    }

    pub(super) fn receive_splits(&self, rank: usize, window: usize) -> Vec<i64> {
        self.group.incoming(rank, window).splits.into_iter().map(signed).collect()
    }

    pub(super) fn reads(&self, rank: usize, window: usize) -> Vec<i64> {
        let read = |(source, range): (usize, std::ops::Range<u64>)| {
            [i64::try_from(source).unwrap_or(i64::MAX), signed(range.start), signed(range.end)]
        };
        self.group.reads(rank, window).into_iter().flat_map(read).collect()
    }

    /// Flattened matrix in row-major order.
    pub(super) fn sent_bytes(&self, window: usize) -> Vec<i64> {
        self.group.sent_bytes(window).into_iter().flatten().map(signed).collect()
    }

    pub(super) fn is_cached(&self, name: &str) -> Result<bool> {
        guard(|| Ok(self.group.route_of(self.group.checkpoint().position(name)?) == Some(Route::Cached)))
    }

    /// Index and number of the parts of the files that the rank compares with its digests first; empty for none.
    pub(super) fn part_to_verify(&self, rank: usize) -> Vec<i64> {
        let part = self.group.part_to_verify(rank);
        part.map_or_else(Vec::new, |(part, parts)| vec![signed(to_u64(part)), signed(to_u64(parts))])
    }

    /// Selects some of a rank's shards, given the indices of its requests, for the rank to read without the others.
    pub(super) fn select_own(&self, rank: usize, items: &[i64]) -> Result<Box<Selection>> {
        guard(|| {
            let item_index = |&item: &i64| usize::try_from(item).unwrap_or(usize::MAX);
            let regions: Vec<_> =
                items.iter().map(|item| self.group.region_of(rank, item_index(item))).collect::<Result<_>>()?;
            let ranks = self.group.cached_ranks(rank);
            let shards = if ranks > 1 { Shards::Cached { ranks } } else { Shards::Own };
            Ok(select(&self.group, &self.mappings, regions.into(), shards))
        })
    }

    pub(super) fn digest(&self) -> u64 {
        self.group.digest()
    }
}

pub(super) fn plan_rank(plan: &GroupPlan, rank: usize) -> Result<Box<RankPlan>> {
    guard(|| {
        let group = &plan.group;
        let (mut regions, mut region_indices) = (Vec::new(), HashMap::new());
        for window in 0..group.windows() {
            let outgoing = group.outgoing(rank, window);
            for shard_range in outgoing.local.iter().chain(outgoing.sends.iter().map(|(shard_range, _)| shard_range)) {
                if let Entry::Vacant(region_index) = region_indices.entry((shard_range.rank, shard_range.item)) {
                    region_index.insert(regions.len());
                    regions.push(group.region_of(shard_range.rank, shard_range.item)?);
                }
            }
        }
        let (group, mappings) = (Arc::clone(group), Arc::clone(&plan.mappings));
        Ok(Box::new(RankPlan { group, mappings, rank, regions: regions.into(), region_indices }))
    })
}

impl RankPlan {
    pub(super) fn selection(&self) -> Box<Selection> {
        select(&self.group, &self.mappings, Arc::clone(&self.regions), Shards::Exchanged)
    }

    /// Returns the rank's own shards, in the order of its requests.
    pub(super) fn shards(&self) -> Result<Vec<ffi::Spec>> {
        guard(|| {
            let items = 0..self.group.requests(self.rank).len();
            items.map(|item| spec(&self.group.region_of(self.rank, item)?)).collect()
        })
    }

    pub(super) fn local_ranges(&self, window: usize) -> Result<Vec<ffi::LocalRange>> {
        guard(|| {
            let local = |shard_range: ShardRange| {
                let ShardRange { item, begin, end, .. } = shard_range;
                Ok(ffi::LocalRange { tensor: self.region_index(&shard_range)?, item, begin, end })
            };
            self.group.outgoing(self.rank, window).local.into_iter().map(local).collect()
        })
    }

    pub(super) fn send_ranges(&self, window: usize) -> Result<Vec<ffi::SendRange>> {
        guard(|| {
            let send = |(shard_range, offset): (ShardRange, u64)| {
                let ShardRange { begin, end, .. } = shard_range;
                Ok(ffi::SendRange { tensor: self.region_index(&shard_range)?, begin, end, offset })
            };
            self.group.outgoing(self.rank, window).sends.into_iter().map(send).collect()
        })
    }

    pub(super) fn receive_ranges(&self, window: usize) -> Vec<ffi::ReceiveRange> {
        let receive = |(shard_range, offset): (ShardRange, u64)| {
            let ShardRange { item, begin, end, .. } = shard_range;
            ffi::ReceiveRange { item, begin, end, offset }
        };
        self.group.incoming(self.rank, window).shard_ranges.into_iter().map(receive).collect()
    }

    pub(super) fn record(&self, bytes: u64, device: &str) -> Box<Recording> {
        self.selection().record_bytes(bytes, device)
    }

    fn region_index(&self, shard_range: &ShardRange) -> Result<usize> {
        let missing = || Error::new(Kind::Internal, format!("{shard_range:?} is not in the selection"));
        self.region_indices.get(&(shard_range.rank, shard_range.item)).copied().ok_or_else(missing)
    }
}

/// Selects regions that a rank of the group reads.
fn select(
    group: &Arc<Group>,
    mappings: &Arc<Mappings>,
    regions: Arc<[TensorRegion]>,
    shards: Shards,
) -> Box<Selection> {
    let selection = selection::Selection::from_regions(group.checkpoint(), regions);
    Box::new(Selection::new(selection, Arc::clone(mappings), Reads::OfRank(Arc::clone(group), shards)))
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
