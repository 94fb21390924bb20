//! Classes of tensors whose shards have the same offsets from the first byte of the tensor. A model has few of them: one
//! for each shape and layout. The planner computes and counts the shards of a class once.

use super::LoadRequest;
use super::shard::Shard;
use crate::checkpoint::region::{IndexRange, StridedRange};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::remote::transfer::limits;
use std::ops::Range;

/// Properties of a tensor that determine its shards.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct ClassKey<'a> {
    pub(super) shape: Vec<u64>,
    pub(super) item_bytes: u64,
    /// Size of the tensor; zero if it is stored without data.
    pub(super) bytes: u64,
    /// List and shard of each request.
    pub(super) shards: Vec<(usize, &'a Shard)>,
}

/// Shards of all ranks, for each tensor of a class. Offsets count from the first byte of the tensor.
#[derive(Debug)]
pub(super) struct Class {
    /// Index of the class.
    pub(super) id: usize,
    /// Size of a tensor.
    pub(super) bytes: u64,
    /// Shards in the order of ranks, each rank's in the order of its requests.
    pub(super) shards: Vec<ClassShard>,
    /// Range from the first requested byte to the end of the last.
    pub(super) hull: Range<u64>,
    /// Number of bytes that at least one rank requests.
    pub(super) requested_bytes: u64,
    /// Sum of the sizes of all shards.
    pub(super) kept_bytes: u64,
    /// Ranks that request any bytes.
    pub(super) readers: Readers,
    /// Whether every rank requests the whole tensor, once.
    pub(super) is_replicated: bool,
    /// Whether a shard has rows that are shorter than the gaps that requests for objects cover.
    pub(super) has_short_rows: bool,
    /// For each request for the tensor, its list. Lists are in ascending order.
    pub(super) lists: Vec<usize>,
    /// For each request for the tensor, the size of the largest shard of any rank.
    pub(super) largest: Vec<u64>,
    /// Upper bound of the ranks that receive one element: the smallest overlap of index ranges in any dimension.
    pub(super) copies_max: u64,
}

/// Shard of one rank.
#[derive(Debug)]
pub(super) struct ClassShard {
    pub(super) rank: usize,
    /// Index into the requests for the tensor.
    pub(super) request: usize,
    pub(super) rows: StridedRange,
}

/// Ranks that request bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readers {
    None,
    One(usize),
    Several,
}

impl Readers {
    fn with(self, rank: usize) -> Readers {
        match self {
            Readers::None => Readers::One(rank),
            Readers::One(other) if other == rank => self,
            _ => Readers::Several,
        }
    }
}

impl Class {
    /// Computes the shards of a class. Fails with `invalid-argument` if ranks disagree about the layout, or a request
    /// is not one index region of a rank.
    pub(super) fn of(id: usize, key: &ClassKey<'_>, request: &LoadRequest, ranks_of: &[Vec<usize>]) -> Result<Class> {
        check_layout(&key.shards, ranks_of)?;
        let ranks = request.list_of_rank.len();
        let whole = StridedRange { begin: 0, row_bytes: key.bytes, strides: Vec::new() };
        let (mut shards, mut regions) = (Vec::new(), Vec::new());
        for (index, (list, shard)) in key.shards.iter().enumerate() {
            for &rank in ranks_of.get(*list).map_or(&[][..], Vec::as_slice) {
                let region = shard.index_ranges(&request.layouts, &key.shape, rank, ranks)?;
                let rows = match shard {
                    _ if key.bytes == 0 => whole.clone(),
                    Shard::Whole => whole.clone(),
                    _ => StridedRange::of(0, key.item_bytes, &key.shape, &region),
                };
                shards.push(ClassShard { rank, request: index, rows });
                regions.push(region);
            }
        }
        shards.sort_by_key(|shard| (shard.rank, shard.request));
        let mut class = Class {
            id,
            bytes: key.bytes,
            shards: Vec::new(),
            hull: 0..0,
            requested_bytes: 0,
            kept_bytes: 0,
            readers: Readers::None,
            is_replicated: false,
            has_short_rows: false,
            lists: key.shards.iter().map(|(list, _)| *list).collect(),
            largest: vec![0; key.shards.len()],
            copies_max: copies_max(key.shape.len(), &regions),
        };
        let (mut spans, mut counts, mut are_whole) = (Vec::new(), vec![0_usize; ranks], true);
        for ClassShard { rank, request, rows } in shards.iter().filter(|shard| shard.rows.bytes() > 0) {
            let bytes = rows.bytes();
            spans.push(rows.begin..rows.end());
            are_whole &= *rows == whole;
            counts.get_mut(*rank).into_iter().for_each(|count| *count += 1);
            class.largest.get_mut(*request).into_iter().for_each(|largest| *largest = bytes.max(*largest));
            class.has_short_rows |= rows.row_bytes <= limits::GAP_BYTES;
            class.kept_bytes = class.kept_bytes.saturating_add(bytes);
            class.readers = class.readers.with(*rank);
        }
        class.is_replicated = are_whole && counts.iter().all(|&count| count == 1);
        (class.hull, class.requested_bytes) = union(spans);
        class.shards = shards;
        Ok(class)
    }

    /// Returns the shards of a rank.
    pub(super) fn shards_of(&self, rank: usize) -> &[ClassShard] {
        let begin = self.shards.partition_point(|shard| shard.rank < rank);
        let rest = self.shards.get(begin..).unwrap_or_default();
        rest.get(..rest.partition_point(|shard| shard.rank == rank)).unwrap_or_default()
    }

    /// Returns for each request the most bytes that any rank keeps of a byte range of the tensor.
    pub(super) fn largest_within(&self, range: Range<u64>) -> Vec<u64> {
        if range.start <= self.hull.start && self.hull.end <= range.end {
            return self.largest.clone();
        }
        let mut largest = vec![0; self.largest.len()];
        for ClassShard { request, rows, .. } in &self.shards {
            let bytes = rows.bytes_before(range.end) - rows.bytes_before(range.start);
            largest.get_mut(*request).into_iter().for_each(|largest| *largest = bytes.max(*largest));
        }
        largest
    }
}

/// Checks that all ranks that shard a tensor over the group use the same layout.
fn check_layout(requests: &[(usize, &Shard)], ranks_of: &[Vec<usize>]) -> Result<()> {
    let mut first: Option<(usize, &Shard)> = None;
    for (list, shard) in requests {
        let rank = ranks_of.get(*list).and_then(|ranks| ranks.first());
        let (Some(&rank), Shard::Whole | Shard::Chunk { .. }) = (rank, shard) else { continue };
        match first {
            Some((other, agreed)) if agreed != *shard => {
                let message = format!(
                    "rank {other} requests {agreed} and rank {rank} requests {shard}; pass the same layout on all ranks"
                );
                return Err(Error::new(Kind::InvalidArgument, message));
            }
            Some(_) => {}
            None => first = Some((rank, shard)),
        }
    }
    Ok(())
}

/// Returns the smallest number of regions, over all dimensions, that overlap at an index of the dimension.
fn copies_max(dims: usize, regions: &[Vec<IndexRange>]) -> u64 {
    let overlap = |dim: usize| {
        let mut edges: Vec<(u64, i64)> = Vec::with_capacity(2 * regions.len());
        let index_ranges = regions.iter().filter_map(|region| region.get(dim));
        for index_range in index_ranges.filter(|index_range| index_range.length > 0) {
            edges.extend([(index_range.start, 1), (index_range.start + index_range.length, -1)]);
        }
        // At equal positions, ends sort before starts.
        edges.sort_unstable();
        let (mut now, mut most) = (0_i64, 0);
        for (_, change) in edges {
            now += change;
            most = most.max(now);
        }
        u64::try_from(most).unwrap_or(0)
    };
    (0..dims).map(overlap).min().unwrap_or(to_u64(regions.len()))
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
