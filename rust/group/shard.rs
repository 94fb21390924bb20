//! Shard requests: the parts of tensors that ranks load.

use super::mesh::MeshLayout;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{IndexRange, TensorRegion, torch_shape};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use std::fmt;
use std::ops::Range;

/// Request for a shard of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardRequest {
    /// Index of the tensor in the checkpoint.
    pub tensor: usize,
    /// Requested shard.
    pub shard: Shard,
}

/// Part of a tensor that one rank keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Shard {
    /// The whole tensor.
    Whole,
    /// Chunk of this rank, as `torch.chunk` splits a dimension into one chunk for each rank: chunks have equal sizes,
    /// except that the last ones may be smaller or empty.
    Chunk {
        /// Dimension that is split.
        dim: usize,
    },
    /// Index region.
    IndexRegion {
        /// Indices of each dimension.
        index_ranges: Vec<IndexRange>,
    },
    /// Local part of this rank in a layout over a mesh. It is one index region.
    Local {
        /// Index into [`GroupRequest::layouts`](super::GroupRequest::layouts).
        layout: usize,
    },
}

impl ShardRequest {
    /// Decodes requests from numbers: the number of mesh layouts, the layouts as [`MeshLayout::decode`] takes them, and
    /// the requests. Each request begins with the index of its tensor, followed by one of
    ///
    /// - 0: the whole tensor;
    /// - 1 and a dimension, which may be negative: a chunk;
    /// - 2, the first index of each dimension, and the number of indices of each dimension: an index region;
    /// - 3 and the index of a layout: the local part of this rank.
    ///
    /// Layouts that are not yet in `layouts` are appended to it. Fails with `invalid-argument` if the numbers do not
    /// fit the tensors; `unsupported-dtype` if PyTorch has no dtype for one.
    pub fn decode(
        numbers: &[i64],
        checkpoint: &Checkpoint,
        layouts: &mut Vec<MeshLayout>,
    ) -> Result<Vec<ShardRequest>> {
        let invalid = || Error::new(Kind::InvalidArgument, "shard requests begin with the number of mesh layouts");
        let (&count, mut numbers) = numbers.split_first().filter(|(count, _)| **count >= 0).ok_or_else(invalid)?;
        let mut layout_indices = Vec::new();
        for _ in 0..count {
            let (layout, used) = MeshLayout::decode(numbers)?;
            numbers = numbers.get(used..).unwrap_or_default();
            layout_indices.push(index_of(layout, layouts));
        }
        let mut requests = Vec::new();
        while let [tensor, kind, rest @ ..] = numbers {
            let missing = || Error::new(Kind::InvalidArgument, format!("the checkpoint has no tensor {tensor}"));
            let tensor = usize::try_from(*tensor).map_err(|_| missing())?;
            let (source, entry) = checkpoint.entry(tensor).ok_or_else(missing)?;
            let decoded = torch_shape(entry).and_then(|shape| {
                let refused = |message| Error::new(Kind::InvalidArgument, message).tensor(entry.name);
                let (mut shard, used) = Shard::decode(*kind, rest, &shape).map_err(refused)?;
                match &mut shard {
                    Shard::IndexRegion { index_ranges } => {
                        TensorRegion::indexed(source, entry, index_ranges)?;
                    }
                    Shard::Local { layout } => {
                        let missing = || refused(format!("there is no mesh layout {layout}"));
                        let found = *layout_indices.get(*layout).ok_or_else(missing)?;
                        if !layouts.get(found).is_some_and(|layout| layout.fits(shape.len())) {
                            let message =
                                format!("mesh layout {layout} shards a dimension that the shape {shape:?} lacks");
                            return Err(refused(message));
                        }
                        *layout = found;
                    }
                    Shard::Whole | Shard::Chunk { .. } => {}
                }
                Ok((shard, used))
            });
            let (shard, used) = decoded.map_err(|error| checkpoint.locate(source, error))?;
            requests.push(ShardRequest { tensor, shard });
            numbers = rest.get(used..).unwrap_or_default();
        }
        if !numbers.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "the last shard request is incomplete"));
        }
        Ok(requests)
    }
}

impl Shard {
    /// Decodes a shard. Returns it with the count of numbers it used.
    fn decode(kind: i64, numbers: &[i64], shape: &[u64]) -> std::result::Result<(Shard, usize), String> {
        match (kind, numbers) {
            (0, _) => Ok((Shard::Whole, 0)),
            (1, [dim, ..]) => match position_of(*dim, shape.len()) {
                Some(dim) => Ok((Shard::Chunk { dim }, 1)),
                None => Err(format!("cannot split dimension {dim} of a tensor with shape {shape:?} into chunks")),
            },
            (2, _) => {
                let count = shape.len();
                let (starts, lengths) = (numbers.get(..count), numbers.get(count..2 * count));
                let (starts, lengths) = starts.zip(lengths).ok_or("an index region has too few numbers")?;
                let index_range = |(&start, &length): (&i64, &i64)| {
                    let (start, length) = (u64::try_from(start).ok()?, u64::try_from(length).ok()?);
                    Some(IndexRange { start, length, step: 1 })
                };
                let index_ranges: Option<Vec<IndexRange>> = starts.iter().zip(lengths).map(index_range).collect();
                let index_ranges = index_ranges.ok_or("an index region has negative numbers")?;
                Ok((Shard::IndexRegion { index_ranges }, 2 * count))
            }
            (3, [layout, ..]) => {
                let layout = usize::try_from(*layout).map_err(|_| format!("there is no mesh layout {layout}"))?;
                Ok((Shard::Local { layout }, 1))
            }
            _ => Err(format!("{kind} is not a kind of shard")),
        }
    }

    /// Returns the indices of each dimension that `rank` of `ranks` ranks keeps. Fails with `invalid-argument` if the
    /// rank is not in the mesh of a layout, or has several index regions.
    pub fn index_ranges(
        &self,
        layouts: &[MeshLayout],
        shape: &[u64],
        rank: usize,
        ranks: usize,
    ) -> Result<Vec<IndexRange>> {
        Ok(match self {
            Shard::Whole => shape.iter().map(|&size| IndexRange::whole(size)).collect(),
            Shard::IndexRegion { index_ranges } => index_ranges.clone(),
            Shard::Local { layout } => {
                let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
                let missing = || invalid(format!("there is no mesh layout {layout}"));
                let layout = layouts.get(*layout).ok_or_else(missing)?;
                let outside = || invalid(format!("rank {rank} requests its part of a mesh that it is not in"));
                let coordinate = layout.mesh().coordinate(rank).ok_or_else(outside)?;
                let index_range = |ranges: Vec<Range<u64>>| match &ranges[..] {
                    [] => Ok(IndexRange { start: 0, length: 0, step: 1 }),
                    [Range { start, end }] => Ok(IndexRange { start: *start, length: end - start, step: 1 }),
                    _ => Err(invalid(format!("rank {rank} has several index regions; request them one by one"))),
                };
                layout.indices(shape, &coordinate).into_iter().map(index_range).collect::<Result<_>>()?
            }
            Shard::Chunk { dim } => {
                let chunk = |(position, &size): (usize, &u64)| {
                    if position != *dim {
                        return IndexRange::whole(size);
                    }
                    let length = size.div_ceil(to_u64(ranks).max(1));
                    let start = to_u64(rank).saturating_mul(length).min(size);
                    IndexRange { start, length: length.min(size - start), step: 1 }
                };
                shape.iter().enumerate().map(chunk).collect()
            }
        })
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shard::Whole => write!(f, "the whole tensor"),
            Shard::Chunk { dim } => write!(f, "a chunk of dimension {dim}"),
            Shard::Local { layout } => write!(f, "its part of mesh layout {layout}"),
            Shard::IndexRegion { index_ranges } => {
                let ranges: Vec<String> = index_ranges
                    .iter()
                    .map(|index_range| format!("{}:{}", index_range.start, index_range.start + index_range.length))
                    .collect();
                write!(f, "[{}]", ranges.join(", "))
            }
        }
    }
}

/// Returns the index of a layout, which is appended if it is new.
fn index_of(layout: MeshLayout, layouts: &mut Vec<MeshLayout>) -> usize {
    let found = layouts.iter().position(|other| *other == layout);
    found.unwrap_or_else(|| {
        layouts.push(layout);
        layouts.len() - 1
    })
}

/// Returns the position of a dimension that may be negative.
fn position_of(dim: i64, count: usize) -> Option<usize> {
    let count_signed = i64::try_from(count).ok()?;
    let position = if dim < 0 { dim.checked_add(count_signed)? } else { dim };
    usize::try_from(position).ok().filter(|&position| position < count)
}
