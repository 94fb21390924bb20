//! Index regions of a tensor, and the ranks that hold each of them.
//!
//! A region is the product of one set of indices for each dimension. The local tensor of a rank has the elements of its
//! region in row-major order, so the bytes that a rank holds of any byte range of the tensor are contiguous in its local
//! tensor.

use super::{IndexBox, Layout};
use crate::ranks::mesh::coordinate_of;
use std::collections::HashMap;
use std::ops::{ControlFlow, Range};

/// Ascending ranges of indices of one dimension.
pub(super) type IndexSet = Vec<Range<u64>>;

/// Regions of a tensor of one shape and element size. Together they have each byte of the tensor once.
#[derive(Debug)]
pub(super) struct Regions {
    shape: Vec<u64>,
    item_bytes: u64,
    /// Bytes from an index to the next one, for each dimension.
    strides: Vec<u64>,
    /// Distinct index sets of each dimension.
    sets: Vec<Vec<IndexSet>>,
    /// Index set in each dimension, of each region in turn.
    set_indices: Vec<usize>,
    /// Regions with bytes, in the order of their first byte.
    regions: Vec<Region>,
    /// For each region, the largest end of a hull up to it.
    ends: Vec<u64>,
    /// Ranks of each region in turn. All regions of a mesh have the same number of ranks, in the order of their
    /// coordinates in the mesh dimensions that do not shard the tensor.
    holders: Vec<usize>,
    /// Region of each rank, and the index of the rank among the holders of the region.
    of_rank: Vec<Option<(usize, usize)>>,
}

/// Region of the tensor.
#[derive(Clone, Debug)]
struct Region {
    /// Bytes from the first byte of the region to the end of its last.
    hull: Range<u64>,
    bytes: u64,
    holders: Range<usize>,
}

/// Region before it has its order: its index sets and its holders.
struct Unordered {
    set_indices: Vec<usize>,
    holders: Vec<usize>,
}

impl Regions {
    /// Creates the regions of a tensor. The layout fits the shape and the number of ranks.
    pub(super) fn new(layout: &Layout, shape: &[u64], item_bytes: u64, ranks: usize) -> Regions {
        let (sets, unordered) = match layout {
            Layout::Mesh(layout) => {
                let sets: Vec<Vec<IndexSet>> =
                    shape.iter().enumerate().map(|(dim, &size)| layout.shard_indices(dim, size)).collect();
                let mesh = layout.mesh();
                let mesh_dims: Vec<Vec<usize>> = (0..shape.len()).map(|dim| layout.mesh_dims(dim).collect()).collect();
                let mut unordered: Vec<Unordered> = Vec::new();
                let mut indices: HashMap<Vec<usize>, usize> = HashMap::new();
                for (place, &rank) in mesh.ranks().iter().enumerate() {
                    let coordinate = coordinate_of(place, mesh.shape());
                    let index = |dims: &Vec<usize>| {
                        dims.iter().fold(0, |index, &dim| {
                            let (size, place) = (mesh.shape().get(dim), coordinate.get(dim));
                            index * size.copied().unwrap_or(1) + place.copied().unwrap_or(0)
                        })
                    };
                    let set_indices: Vec<usize> = mesh_dims.iter().map(index).collect();
                    match indices.get(&set_indices).and_then(|&region| unordered.get_mut(region)) {
                        Some(region) => region.holders.push(rank),
                        None => {
                            indices.insert(set_indices.clone(), unordered.len());
                            unordered.push(Unordered { set_indices, holders: vec![rank] });
                        }
                    }
                }
                (sets, unordered)
            }
            // A save refuses these.
            Layout::Whole | Layout::Chunk { .. } => (Vec::new(), Vec::new()),
            Layout::Boxes(boxes) => {
                let mut sets: Vec<Vec<IndexSet>> = vec![Vec::new(); shape.len()];
                let mut known: HashMap<(usize, Range<u64>), usize> = HashMap::new();
                let unordered = boxes.iter().map(|IndexBox { rank, indices }| {
                    let index = |(dim, (range, sets)): (usize, (&Range<u64>, &mut Vec<IndexSet>))| {
                        *known.entry((dim, range.clone())).or_insert_with(|| {
                            sets.push(if range.is_empty() { Vec::new() } else { vec![range.clone()] });
                            sets.len() - 1
                        })
                    };
                    let set_indices = indices.iter().zip(&mut sets).enumerate().map(index).collect();
                    Unordered { set_indices, holders: vec![*rank] }
                });
                let unordered = unordered.collect();
                (sets, unordered)
            }
        };
        let mut strides = vec![item_bytes; shape.len()];
        let mut stride = item_bytes;
        for (into, &size) in strides.iter_mut().zip(shape).rev() {
            *into = stride;
            stride *= size;
        }
        let mut regions = Regions {
            shape: shape.to_vec(),
            item_bytes,
            strides,
            sets,
            set_indices: Vec::new(),
            regions: Vec::new(),
            ends: Vec::new(),
            holders: Vec::new(),
            of_rank: vec![None; ranks],
        };
        regions.add_all(unordered);
        regions
    }

    fn add_all(&mut self, unordered: Vec<Unordered>) {
        let mut ordered: Vec<(Range<u64>, u64, Unordered)> = Vec::with_capacity(unordered.len());
        for region in unordered {
            let (mut hull, mut bytes) = (0..self.item_bytes, self.item_bytes);
            let dims = self.sets.iter().zip(&region.set_indices).zip(&self.strides);
            for ((sets, &index), stride) in dims {
                let set = sets.get(index).map_or(&[][..], Vec::as_slice);
                bytes *= count(set);
                if let (Some(first), Some(last)) = (set.first(), set.last()) {
                    hull.start += first.start * stride;
                    hull.end += (last.end - 1) * stride;
                }
            }
            if bytes > 0 {
                ordered.push((hull, bytes, region));
            }
        }
        ordered.sort_by_key(|(hull, ..)| hull.start);
        let mut end = 0;
        for (hull, bytes, region) in ordered {
            let first = self.holders.len();
            for (replica, &rank) in region.holders.iter().enumerate() {
                if let Some(place) = self.of_rank.get_mut(rank) {
                    *place = Some((self.regions.len(), replica));
                }
            }
            self.holders.extend(region.holders);
            self.set_indices.extend(region.set_indices);
            end = hull.end.max(end);
            self.ends.push(end);
            self.regions.push(Region { hull, bytes, holders: first..self.holders.len() });
        }
    }

    /// Returns the number of regions with bytes.
    pub(super) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns the sizes of the tensor.
    pub(super) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the bytes from an index of a dimension to the next one.
    pub(super) fn stride(&self, dim: usize) -> u64 {
        self.strides.get(dim).copied().unwrap_or(self.item_bytes)
    }

    /// Returns the index of a region's set among the distinct ones of a dimension.
    pub(super) fn set_index(&self, region: usize, dim: usize) -> usize {
        self.set_indices.get(region * self.shape.len() + dim).copied().unwrap_or(0)
    }

    /// Returns the indices of a region in a dimension.
    pub(super) fn set(&self, region: usize, dim: usize) -> &[Range<u64>] {
        let set = self.sets.get(dim).and_then(|sets| sets.get(self.set_index(region, dim)));
        set.map_or(&[], Vec::as_slice)
    }

    /// Returns whether a region has all indices of a dimension.
    pub(super) fn is_whole(&self, region: usize, dim: usize) -> bool {
        matches!(self.set(region, dim), [range] if Some(&(range.end - range.start)) == self.shape.get(dim))
    }

    /// Returns the bytes from the first byte of a region to the end of its last.
    pub(super) fn hull(&self, region: usize) -> Range<u64> {
        self.regions.get(region).map_or(0..0, |region| region.hull.clone())
    }

    /// Returns the number of bytes of a region.
    pub(super) fn bytes(&self, region: usize) -> u64 {
        self.regions.get(region).map_or(0, |region| region.bytes)
    }

    /// Returns the ranks that hold a region.
    pub(super) fn holders(&self, region: usize) -> &[usize] {
        let holders = self.regions.get(region).and_then(|region| self.holders.get(region.holders.clone()));
        holders.unwrap_or_default()
    }

    /// Returns the region of a rank, and the index of the rank among its holders. `None` if the rank has no bytes.
    pub(super) fn of_rank(&self, rank: usize) -> Option<(usize, usize)> {
        self.of_rank.get(rank).copied().flatten()
    }

    /// Returns the shape of the local tensor of the ranks of a region.
    pub(super) fn local_shape(&self, region: usize) -> Vec<u64> {
        (0..self.shape.len()).map(|dim| count(self.set(region, dim))).collect()
    }

    /// Returns the rank that sends bytes of a region to `rank`, or `rank` itself if it holds them. Of several holders, it is
    /// the one with the coordinates of `rank`.
    pub(super) fn sender(&self, region: usize, rank: usize) -> Option<usize> {
        let own = self.of_rank(rank);
        if own.is_some_and(|(own, _)| own == region) {
            return Some(rank);
        }
        let holders = self.holders(region);
        let replica = own.map_or(0, |(_, replica)| replica) % holders.len().max(1);
        holders.get(replica).copied()
    }

    /// Returns the regions whose hull overlaps a byte range, in the order of their first byte.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = usize> + use<'_> {
        let end = self.regions.partition_point(|region| region.hull.start < range.end);
        let begin = range.start;
        let first = self.ends.partition_point(|&end| end <= begin);
        (first..end).filter(move |&index| self.regions.get(index).is_some_and(|region| region.hull.end > begin))
    }

    /// Returns the number of bytes of a region before a byte of the tensor.
    pub(super) fn bytes_before(&self, region: usize, byte: u64) -> u64 {
        let (mut rest, mut inner, mut before) = (byte, self.bytes(region), 0);
        for dim in 0..self.shape.len() {
            let set = self.set(region, dim);
            let stride = self.stride(dim);
            let index = rest / stride;
            rest %= stride;
            let (mut length, mut below, mut is_inside) = (0, 0, false);
            for range in set {
                length += range.end - range.start;
                below += index.clamp(range.start, range.end) - range.start;
                is_inside |= range.contains(&index);
            }
            inner = inner.checked_div(length).unwrap_or(0);
            before += below * inner;
            if !is_inside {
                return before;
            }
        }
        before + rest.min(inner)
    }

    /// Returns the bytes of a region in a byte range of the tensor, as a byte range of the local tensor.
    pub(super) fn local_range(&self, region: usize, range: &Range<u64>) -> Range<u64> {
        self.bytes_before(region, range.start)..self.bytes_before(region, range.end)
    }

    /// Calls `visit` with each contiguous byte range of a region within `range`, in ascending order, until `visit`
    /// breaks.
    pub(super) fn for_each_run(
        &self,
        region: usize,
        range: &Range<u64>,
        mut visit: impl FnMut(Range<u64>) -> ControlFlow<()>,
    ) {
        let dim = (0..self.shape.len()).rev().find(|&dim| !self.is_whole(region, dim));
        let _ = self.for_each_range(region, dim, range, &mut visit);
    }

    /// Calls `visit` with each byte range of the indices of dimension `last` within `range`, as if the region had all
    /// indices of the inner dimensions. Without `last`, the tensor is one range.
    pub(super) fn for_each_range(
        &self,
        region: usize,
        last: Option<usize>,
        range: &Range<u64>,
        visit: &mut impl FnMut(Range<u64>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        match last {
            Some(last) => self.walk(region, 0, last, 0, range, visit),
            None => {
                let whole = self.shape.iter().fold(self.item_bytes, |bytes, size| bytes * size);
                let end = range.end.min(whole);
                if range.start < end { visit(range.start..end) } else { ControlFlow::Continue(()) }
            }
        }
    }

    fn walk(
        &self,
        region: usize,
        dim: usize,
        last: usize,
        base: u64,
        range: &Range<u64>,
        visit: &mut impl FnMut(Range<u64>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let stride = self.stride(dim);
        for indices in self.set(region, dim) {
            let from = (base + indices.start * stride).max(range.start);
            let to = (base + indices.end * stride).min(range.end);
            if from >= to {
                continue;
            }
            if dim == last {
                visit(from..to)?;
                continue;
            }
            for index in (from - base) / stride..=(to - 1 - base) / stride {
                self.walk(region, dim + 1, last, base + index * stride, range, visit)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Returns an upper bound of the bytes of a region in any `length` consecutive bytes of the tensor.
    pub(super) fn bytes_within(&self, region: usize, length: u64) -> u64 {
        let mut inner = self.item_bytes;
        let mut most = length.min(inner);
        for dim in (0..self.shape.len()).rev() {
            let indices = count(self.set(region, dim));
            let stride = self.stride(dim);
            let touched = length / stride + 2;
            // A range that is no longer than an index touches two of them.
            let partial = if length <= stride { most.saturating_mul(2) } else { u64::MAX };
            inner = inner.saturating_mul(indices);
            let touched = touched.min(indices).saturating_mul(inner / indices.max(1));
            most = touched.min(partial).min(length);
        }
        most
    }
}

/// Returns the number of indices of a set.
pub(super) fn count(set: &[Range<u64>]) -> u64 {
    set.iter().map(|range| range.end - range.start).sum()
}
