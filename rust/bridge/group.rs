//! Plans for groups of ranks, and what one rank does of them.

use super::checkpoint::Checkpoint;
use super::ffi;
use super::guard::guard;
use super::selection::{Recording, Selection, spec};
use crate::checkpoint::region::Wanted;
use crate::checkpoint::selection;
use crate::error::{Error, Kind, Result};
use crate::group::{Collective, Group, Piece, Request, Strategy, Want};
use crate::load::views::Mappings;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// A plan that all ranks of a group share.
pub(super) struct GroupPlan {
    group: Arc<Group>,
    mappings: Arc<Mappings>,
}

/// What one rank reads, sends and gets.
pub(super) struct RankPlan {
    group: Arc<Group>,
    mappings: Arc<Mappings>,
    rank: usize,
    /// All shares that it reads something of, whoever they belong to.
    wanted: Arc<[Wanted]>,
    places: HashMap<(usize, usize), usize>,
}

pub(super) fn plan_group(
    checkpoint: &Checkpoint,
    requests: &[ffi::ShardRequests],
    requests_of: &[i64],
    caches: &[i64],
    strategy: &str,
    window_bytes: i64,
) -> Result<Box<GroupPlan>> {
    guard(|| {
        let refused = |message: String| Error::new(Kind::InvalidArgument, message);
        let strategy = match strategy {
            "auto" => Strategy::Auto,
            "own" => Strategy::Own,
            "exchange" => Strategy::Exchange,
            other => return Err(refused(format!("strategy is {other:?}; give \"auto\", \"own\" or \"exchange\""))),
        };
        let window_bytes = u64::try_from(window_bytes)
            .map_err(|_| refused(format!("window_bytes is {window_bytes}; it cannot be negative")))?;
        let files = checkpoint.files();
        let list = |&list: &i64| usize::try_from(list).unwrap_or(usize::MAX);
        let request = Request {
            wants: requests.iter().map(|requests| Want::decode(&requests.numbers, files)).collect::<Result<_>>()?,
            wants_of: requests_of.iter().map(list).collect(),
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

    /// Row after row.
    pub(super) fn sent_bytes(&self, window: usize) -> Vec<i64> {
        self.group.sent_bytes(window).into_iter().flatten().map(signed).collect()
    }

    pub(super) fn is_own(&self, name: &str) -> Result<bool> {
        guard(|| Ok(self.group.is_own(self.group.checkpoint().position(name)?)))
    }

    pub(super) fn digest(&self) -> u64 {
        self.group.digest()
    }
}

pub(super) fn plan_rank(plan: &GroupPlan, rank: usize) -> Result<Box<RankPlan>> {
    guard(|| {
        let group = &plan.group;
        let (mut wanted, mut places) = (Vec::new(), HashMap::new());
        for window in 0..group.windows() {
            let outgoing = group.outgoing(rank, window);
            for piece in outgoing.kept.iter().chain(outgoing.sent.iter().map(|(piece, _)| piece)) {
                if let Entry::Vacant(place) = places.entry((piece.rank, piece.item)) {
                    place.insert(wanted.len());
                    wanted.push(group.wanted(piece.rank, piece.item)?);
                }
            }
        }
        let (group, mappings) = (Arc::clone(group), Arc::clone(&plan.mappings));
        Ok(Box::new(RankPlan { group, mappings, rank, wanted: wanted.into(), places }))
    })
}

impl RankPlan {
    pub(super) fn selection(&self) -> Box<Selection> {
        let chosen = selection::Selection::planned(self.group.checkpoint(), Arc::clone(&self.wanted));
        Box::new(Selection::new(chosen, Arc::clone(&self.mappings)))
    }

    /// The rank's own shares, in the order of its wants.
    pub(super) fn shards(&self) -> Result<Vec<ffi::Spec>> {
        guard(|| {
            let items = 0..self.group.wants(self.rank).len();
            items.map(|item| spec(&self.group.wanted(self.rank, item)?)).collect()
        })
    }

    pub(super) fn local_ranges(&self, window: usize) -> Result<Vec<ffi::LocalRange>> {
        guard(|| {
            let kept = |piece: Piece| {
                let Piece { item, begin, end, .. } = piece;
                Ok(ffi::LocalRange { tensor: self.place(&piece)?, item, begin, end })
            };
            self.group.outgoing(self.rank, window).kept.into_iter().map(kept).collect()
        })
    }

    pub(super) fn send_ranges(&self, window: usize) -> Result<Vec<ffi::SendRange>> {
        guard(|| {
            let sent = |(piece, offset): (Piece, u64)| {
                let Piece { begin, end, .. } = piece;
                Ok(ffi::SendRange { tensor: self.place(&piece)?, begin, end, offset })
            };
            self.group.outgoing(self.rank, window).sent.into_iter().map(sent).collect()
        })
    }

    pub(super) fn receive_ranges(&self, window: usize) -> Vec<ffi::ReceiveRange> {
        let arrived = |(piece, offset): (Piece, u64)| {
            let Piece { item, begin, end, .. } = piece;
            ffi::ReceiveRange { item, begin, end, offset }
        };
        self.group.incoming(self.rank, window).pieces.into_iter().map(arrived).collect()
    }

    pub(super) fn record(&self, bytes: u64, device: &str) -> Box<Recording> {
        self.selection().record_bytes(bytes, device)
    }

    fn place(&self, piece: &Piece) -> Result<usize> {
        let missing = || Error::new(Kind::Internal, format!("{piece:?} is not in the selection"));
        self.places.get(&(piece.rank, piece.item)).copied().ok_or_else(missing)
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
