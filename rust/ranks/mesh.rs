//! Device mesh, and the layout of tensors that are sharded over it.
//!
//! A layout is a symbol: it names the ranks once, and gives the indices of any rank for a tensor of any shape.

use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use std::ops::Range;

/// Largest split factor that is accepted. Layouts of PyTorch have the number of ranks in some dimensions of a mesh.
const SPLIT_FACTOR_MAX: u64 = 1 << 16;

/// Array of ranks of a group, equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    shape: Vec<usize>,
    /// Ranks in row-major order.
    ranks: Vec<usize>,
    /// Each rank with its index in `ranks`, in ascending order.
    indices: Vec<(usize, usize)>,
}

/// Placement of a tensor on one dimension of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has the same indices.
    Replicated,
    /// The ranks split a dimension of the tensor as `torch.chunk` does.
    Sharded {
        /// Dimension of the tensor.
        dim: usize,
        /// Number of chunks into which the dimension is split first. The ranks split each of them, and a rank has its
        /// parts of all, concatenated.
        split_factor: u64,
    },
}

/// Layout of tensors over a mesh: one placement for each dimension of the mesh, which apply in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshLayout {
    mesh: Mesh,
    placements: Vec<Placement>,
}

/// Indices of one dimension of a tensor that the same ranks have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The indices.
    pub indices: Range<u64>,
    /// Coordinates of the ranks in the mesh dimensions of [`MeshLayout::mesh_dims`].
    pub coordinates: Vec<usize>,
}

impl Mesh {
    /// Creates a mesh from its shape and its ranks in row-major order. Fails with `invalid-argument` if the number of
    /// ranks does not fit the shape, or a rank occurs twice.
    pub fn new(shape: Vec<usize>, ranks: Vec<usize>) -> Result<Mesh> {
        let count = shape.iter().try_fold(1_usize, |count, &size| count.checked_mul(size));
        let mut indices: Vec<(usize, usize)> = ranks.iter().enumerate().map(|(index, &rank)| (rank, index)).collect();
        indices.sort_unstable();
        indices.dedup_by_key(|(rank, _)| *rank);
        if count != Some(ranks.len()) || indices.len() != ranks.len() {
            let message = format!("a mesh of the shape {shape:?} has {} distinct ranks", indices.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Ok(Mesh { shape, ranks, indices })
    }

    /// Returns the number of ranks in each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the ranks in row-major order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the coordinate of a rank, or `None` if it is not in the mesh.
    pub fn coordinate(&self, rank: usize) -> Option<Vec<usize>> {
        let found = self.indices.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
        Some(coordinate_of(self.indices.get(found)?.1, &self.shape))
    }
}

impl MeshLayout {
    /// Creates a layout. Fails with `invalid-argument` if the mesh does not have as many dimensions as there are
    /// placements.
    pub fn new(mesh: Mesh, placements: Vec<Placement>) -> Result<MeshLayout> {
        if mesh.shape.len() != placements.len() {
            let message = format!("{} placements on a mesh of the shape {:?}", placements.len(), mesh.shape);
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Ok(MeshLayout { mesh, placements })
    }

    /// Decodes a layout from the number of mesh dimensions, their sizes, the ranks in row-major order, and two numbers
    /// for each placement: the dimension of the tensor, or -1 if it is replicated, and the split factor. Returns the
    /// layout with the count of numbers it used. Fails with `invalid-argument` if the numbers do not describe a
    /// layout.
    pub fn decode(numbers: &[i64]) -> Result<(MeshLayout, usize)> {
        let message = "the numbers of a mesh layout are incomplete, negative or too large";
        let invalid = || Error::new(Kind::InvalidArgument, message);
        let mut rest = numbers.iter().copied();
        let mut take = |count: usize| {
            let taken: Vec<i64> = rest.by_ref().take(count).collect();
            Some(taken).filter(|taken| taken.len() == count).ok_or_else(invalid)
        };
        let sizes = |numbers: Vec<i64>| -> Result<Vec<usize>> {
            numbers.into_iter().map(|number| usize::try_from(number).map_err(|_| invalid())).collect()
        };
        let ndim = sizes(take(1)?)?.into_iter().next().filter(|&ndim| ndim <= numbers.len()).ok_or_else(invalid)?;
        let shape = sizes(take(ndim)?)?;
        let count = shape.iter().try_fold(1_usize, |count, &size| count.checked_mul(size));
        let ranks = sizes(take(count.filter(|&count| count <= numbers.len()).ok_or_else(invalid)?)?)?;
        let placements = take(2 * ndim)?;
        let is_split_factor = |factor: &u64| (1..=SPLIT_FACTOR_MAX).contains(factor);
        let placement = |pair: &[i64]| match *pair {
            [-1, _] => Ok(Placement::Replicated),
            [dim, split_factor] => Ok(Placement::Sharded {
                dim: usize::try_from(dim).map_err(|_| invalid())?,
                split_factor: u64::try_from(split_factor).ok().filter(is_split_factor).ok_or_else(invalid)?,
            }),
            _ => Err(invalid()),
        };
        let placements: Vec<Placement> = placements.chunks_exact(2).map(placement).collect::<Result<_>>()?;
        let used = 1 + ndim + ranks.len() + 2 * ndim;
        Ok((MeshLayout::new(Mesh::new(shape, ranks)?, placements)?, used))
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the mesh dimensions that shard a dimension of the tensor, in order. Those with one rank are left out.
    pub fn mesh_dims(&self, dim: usize) -> impl Iterator<Item = usize> + '_ {
        self.shards(dim).map(|(mesh_dim, ..)| mesh_dim)
    }

    /// Returns whether the tensor has the dimensions that the layout shards.
    pub fn fits(&self, ndim: usize) -> bool {
        self.placements.iter().all(|placement| match placement {
            Placement::Replicated => true,
            Placement::Sharded { dim, .. } => *dim < ndim,
        })
    }

    /// Returns, for each dimension of a tensor, the ascending ranges of indices that the rank at `coordinate` has.
    pub fn indices(&self, shape: &[u64], coordinate: &[usize]) -> Vec<Vec<Range<u64>>> {
        let own = |(dim, &size): (usize, &u64)| {
            let coordinates = self.mesh_dims(dim).map(|mesh_dim| coordinate.get(mesh_dim).copied().unwrap_or(0));
            self.indices_of(dim, size, coordinates)
        };
        shape.iter().enumerate().map(own).collect()
    }

    /// Returns the cells of a dimension of `size` indices, in ascending order. Together they have all indices once.
    pub fn cells(&self, dim: usize, size: u64) -> Vec<Cell> {
        let mut cells = Vec::new();
        self.for_each_shard(dim, size, |coordinates, ranges| {
            cells.extend(ranges.into_iter().map(|indices| Cell { indices, coordinates: coordinates.to_vec() }));
        });
        cells.sort_by_key(|cell| cell.indices.start);
        cells
    }

    /// Returns the ascending ranges of indices of each shard of a dimension of `size` indices. Shards are in row-major order
    /// of their coordinates in the mesh dimensions of [`mesh_dims`](MeshLayout::mesh_dims).
    pub fn shard_indices(&self, dim: usize, size: u64) -> Vec<Vec<Range<u64>>> {
        let mut shards = Vec::new();
        self.for_each_shard(dim, size, |_, ranges| shards.push(ranges));
        shards
    }

    /// Calls `visit` with the coordinates and the indices of each shard of a dimension.
    fn for_each_shard(&self, dim: usize, size: u64, mut visit: impl FnMut(&[usize], Vec<Range<u64>>)) {
        let sizes: Vec<usize> = self.shards(dim).map(|(_, ranks, _)| ranks).collect();
        for index in 0..sizes.iter().product::<usize>() {
            let coordinates = coordinate_of(index, &sizes);
            visit(&coordinates, self.indices_of(dim, size, coordinates.iter().copied()));
        }
    }

    /// Mesh dimension, number of ranks and split factor of each placement that shards `dim`.
    fn shards(&self, dim: usize) -> impl Iterator<Item = (usize, usize, u64)> + '_ {
        let placements = self.placements.iter().zip(&self.mesh.shape).enumerate();
        placements.filter_map(move |(mesh_dim, (placement, &ranks))| match *placement {
            Placement::Sharded { dim: sharded, split_factor } if sharded == dim && ranks > 1 => {
                Some((mesh_dim, ranks, split_factor))
            }
            _ => None,
        })
    }

    /// Indices of a dimension that the ranks at the coordinates of its mesh dimensions have.
    fn indices_of(&self, dim: usize, size: u64, coordinates: impl Iterator<Item = usize>) -> Vec<Range<u64>> {
        let mut ranges = merge(std::iter::once(0..size));
        for ((_, ranks, split_factor), coordinate) in self.shards(dim).zip(coordinates) {
            let chunks = (0..split_factor).map(|index| chunk(&ranges, index, split_factor));
            ranges = merge(chunks.flat_map(|part| chunk(&part, to_u64(coordinate), to_u64(ranks))));
        }
        ranges
    }
}

/// Returns the coordinate of an index in row-major order.
pub(super) fn coordinate_of(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut coordinate = vec![0; shape.len()];
    for (place, &size) in coordinate.iter_mut().zip(shape).rev() {
        *place = index % size;
        index /= size;
    }
    coordinate
}

/// Returns chunk `index` if `torch.chunk` splits the concatenated ranges into `count` chunks.
fn chunk(ranges: &[Range<u64>], index: u64, count: u64) -> Vec<Range<u64>> {
    let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let length = total.div_ceil(count);
    let begin = index.saturating_mul(length).min(total);
    let end = begin.saturating_add(length).min(total);
    let mut offset = 0;
    let mut parts = Vec::new();
    for range in ranges {
        let count = range.end - range.start;
        let first = begin.saturating_sub(offset).min(count);
        let last = end.saturating_sub(offset).min(count);
        if first < last {
            parts.push(range.start + first..range.start + last);
        }
        offset += count;
    }
    parts
}

/// Joins adjacent ranges and drops empty ones.
fn merge(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ if range.is_empty() => {}
            _ => merged.push(range),
        }
    }
    merged
}
