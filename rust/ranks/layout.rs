//! Layout of tensors over the ranks of a group, which loads and saves encode in the same way.

use super::mesh::MeshLayout;
use crate::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::ops::Range;

/// Index region of a tensor that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IndexBox {
    /// The rank.
    pub rank: usize,
    /// Indices of each dimension.
    pub indices: Vec<Range<u64>>,
}

/// Layout of tensors over ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Ranks of a mesh shard or replicate the tensors.
    Mesh(MeshLayout),
    /// Index regions that tile a tensor. A rank has at most one. A load has the only one that its rank requests.
    Boxes(Vec<IndexBox>),
    /// Each rank that requests a tensor has all of it.
    Whole,
    /// All ranks of the group split a dimension as `torch.chunk` does. A negative one counts from the last.
    Chunk {
        /// Dimension that is split.
        dim: i64,
    },
}

/// Numbers of the variants in encoded layouts.
const MESH: i64 = 0;
const BOXES: i64 = 1;
const WHOLE: i64 = 2;
const CHUNK: i64 = 3;

impl Layout {
    /// Decodes the count of layouts, and the layouts. Returns them with the numbers that follow. Fails with
    /// `invalid-argument` if the numbers do not describe layouts.
    pub fn decode_all(numbers: &[i64]) -> Result<(Vec<Layout>, &[i64])> {
        let invalid = || Error::new(Kind::InvalidArgument, "the numbers of layouts are incomplete or negative");
        let (&count, mut rest) = numbers.split_first().filter(|(count, _)| **count >= 0).ok_or_else(invalid)?;
        let mut layouts = Vec::new();
        for _ in 0..count {
            let (layout, used) = Layout::decode(rest)?;
            layouts.push(layout);
            rest = rest.get(used..).ok_or_else(invalid)?;
        }
        Ok((layouts, rest))
    }

    /// Decodes a layout for tensors of any number of dimensions. Mesh layouts are the number 0 and the numbers of
    /// [`MeshLayout::decode`]. Index regions are the number 1, their count, the number of dimensions, and for each
    /// region its rank, the first index of each dimension and the number of indices of each dimension. The number 2 is
    /// the whole tensor, and the number 3 with a dimension is a chunk. Returns the layout with the count of numbers it
    /// used.
    fn decode(numbers: &[i64]) -> Result<(Layout, usize)> {
        let invalid = || Error::new(Kind::InvalidArgument, "the numbers of a layout are incomplete or negative");
        match numbers {
            [MESH, rest @ ..] => {
                let (layout, used) = MeshLayout::decode(rest)?;
                Ok((Layout::Mesh(layout), 1 + used))
            }
            [BOXES, count, ndim, rest @ ..] => {
                let count = usize::try_from(*count).map_err(|_| invalid())?;
                let ndim = usize::try_from(*ndim).map_err(|_| invalid())?;
                let step = ndim.checked_mul(2).and_then(|step| step.checked_add(1)).ok_or_else(invalid)?;
                let used = count.checked_mul(step).ok_or_else(invalid)?;
                let own = rest.get(..used).ok_or_else(invalid)?;
                let decode = |numbers: &[i64]| {
                    let (rank, bounds) = numbers.split_first()?;
                    let (starts, lengths) = bounds.split_at_checked(ndim)?;
                    let range = |(&start, &length): (&i64, &i64)| {
                        let start = u64::try_from(start).ok()?;
                        Some(start..start.checked_add(u64::try_from(length).ok()?)?)
                    };
                    let indices = starts.iter().zip(lengths).map(range).collect::<Option<_>>()?;
                    Some(IndexBox { rank: usize::try_from(*rank).ok()?, indices })
                };
                let boxes = own.chunks_exact(step).map(decode).collect::<Option<_>>().ok_or_else(invalid)?;
                Ok((Layout::Boxes(boxes), 3 + used))
            }
            [WHOLE, ..] => Ok((Layout::Whole, 1)),
            [CHUNK, dim, ..] => Ok((Layout::Chunk { dim: *dim }, 2)),
            _ => Err(invalid()),
        }
    }

    /// Returns an error text if the layout does not fit a tensor of this shape over this number of ranks.
    pub(super) fn misfit(&self, shape: &[u64], ranks: usize) -> Option<String> {
        match self {
            Layout::Whole | Layout::Chunk { .. } => Some("a save needs the ranks that hold the tensor".to_owned()),
            Layout::Mesh(layout) => {
                if !layout.fits(shape.len()) {
                    return Some(format!("the layout shards a dimension that the shape {shape:?} does not have"));
                }
                let outside = layout.mesh().ranks().iter().find(|&&rank| rank >= ranks)?;
                Some(format!("the mesh has rank {outside}, but the group has {ranks} ranks"))
            }
            Layout::Boxes(boxes) => {
                let mut holders = HashMap::new();
                let mut elements: u128 = 0;
                for index_box in boxes {
                    let IndexBox { rank, indices } = index_box;
                    if *rank >= ranks {
                        return Some(format!("an index region has rank {rank}, but the group has {ranks} ranks"));
                    }
                    let is_inside = indices.len() == shape.len()
                        && indices.iter().zip(shape).all(|(range, &size)| range.end <= size);
                    if !is_inside {
                        return Some(format!("the index region {indices:?} is outside of the shape {shape:?}"));
                    }
                    if let Some(other) = holders.insert(*rank, indices) {
                        return Some(format!(
                            "rank {rank} has the index regions {other:?} and {indices:?}; join them to one, or save them \
                             as tensors of their own"
                        ));
                    }
                    elements += indices.iter().map(|range| u128::from(range.end - range.start)).product::<u128>();
                }
                let all: u128 = shape.iter().map(|&size| u128::from(size)).product();
                let message =
                    || format!("the index regions have {elements} elements, but the shape {shape:?} has {all}");
                (elements != all).then(message)
            }
        }
    }
}
