//! Shard requests: the parts of tensors that ranks load.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{IndexRange, TensorRegion, torch_shape};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::ranks::layout::{IndexBox, Layout};
use crate::ranks::mesh::MeshLayout;
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
        /// Index into [`LoadRequest::layouts`](super::LoadRequest::layouts).
        layout: usize,
    },
}

impl ShardRequest {
    /// Decodes requests from numbers: the layouts as [`Layout::decode_all`] takes them, and for each request the index of
    /// its tensor in the checkpoint and the index of its layout.
    ///
    /// Mesh layouts that are not yet in `layouts` are appended to it. Fails with `invalid-argument` if the numbers do not
    /// fit the tensors; `unsupported-dtype` if PyTorch has no dtype for one.
    pub fn decode(
        numbers: &[i64],
        checkpoint: &Checkpoint,
        layouts: &mut Vec<MeshLayout>,
    ) -> Result<Vec<ShardRequest>> {
        let (own_layouts, numbers) = Layout::decode_all(numbers)?;
        let mesh_index = |layout: &Layout| match layout {
            Layout::Mesh(layout) => index_of(layout, layouts),
            _ => 0,
        };
        let mesh_indices: Vec<usize> = own_layouts.iter().map(mesh_index).collect();
        let (pairs, rest) = numbers.as_chunks();
        if !rest.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "the last shard request is incomplete"));
        }
        let decode = |[tensor, layout]: &[i64; 2]| {
            let missing = || Error::new(Kind::InvalidArgument, format!("the checkpoint has no tensor {tensor}"));
            let tensor = usize::try_from(*tensor).map_err(|_| missing())?;
            let (source, entry) = checkpoint.entry(tensor).ok_or_else(missing)?;
            let decoded = torch_shape(entry).and_then(|shape| {
                let refused = |message| Error::new(Kind::InvalidArgument, message).tensor(entry.name);
                let index = usize::try_from(*layout).unwrap_or(usize::MAX);
                let found = own_layouts.get(index).zip(mesh_indices.get(index));
                let (found, &mesh_index) = found.ok_or_else(|| refused(format!("there is no layout {layout}")))?;
                let shard = Shard::of(found, mesh_index, &shape).map_err(refused)?;
                if let Shard::IndexRegion { index_ranges } = &shard {
                    TensorRegion::indexed(source, entry, index_ranges)?;
                }
                Ok(shard)
            });
            let shard = decoded.map_err(|error| checkpoint.locate(source, error))?;
            Ok(ShardRequest { tensor, shard })
        };
        pairs.iter().map(decode).collect()
    }
}

impl Shard {
    /// Returns the shard of a tensor of this shape that a rank requests in a layout, which has the index `mesh_index` if it
    /// is over a mesh.
    fn of(layout: &Layout, mesh_index: usize, shape: &[u64]) -> std::result::Result<Shard, String> {
        match layout {
            Layout::Whole => Ok(Shard::Whole),
            Layout::Chunk { dim } => match position_of(*dim, shape.len()) {
                Some(dim) => Ok(Shard::Chunk { dim }),
                None => Err(format!("cannot split dimension {dim} of a tensor with shape {shape:?} into chunks")),
            },
            Layout::Boxes(boxes) => match &boxes[..] {
                [IndexBox { indices, .. }] if indices.len() == shape.len() => {
                    let index_range = |range: &Range<u64>| IndexRange {
                        start: range.start,
                        length: range.end - range.start,
                        step: 1,
                    };
                    Ok(Shard::IndexRegion { index_ranges: indices.iter().map(index_range).collect() })
                }
                _ => Err(format!("expected one index region of {} dimensions", shape.len())),
            },
            Layout::Mesh(layout) if layout.fits(shape.len()) => Ok(Shard::Local { layout: mesh_index }),
            Layout::Mesh(_) => {
                Err(format!("mesh layout {mesh_index} shards a dimension that the shape {shape:?} lacks"))
            }
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
fn index_of(layout: &MeshLayout, layouts: &mut Vec<MeshLayout>) -> usize {
    let found = layouts.iter().position(|other| other == layout);
    found.unwrap_or_else(|| {
        layouts.push(layout.clone());
        layouts.len() - 1
    })
}

/// Returns the position of a dimension that may be negative.
fn position_of(dim: i64, count: usize) -> Option<usize> {
    let count_signed = i64::try_from(count).ok()?;
    let position = if dim < 0 { dim.checked_add(count_signed)? } else { dim };
    usize::try_from(position).ok().filter(|&position| position < count)
}
