//! Index regions of quantized tensors: their codes, and the scales of these.

use super::layout::{Elements, Layout, numel};
use super::view::{Dequantized, Stored};
use crate::checkpoint::region::IndexRange;

/// Largest number of bytes of codes that are converted at once, so that a load which copies them needs little memory.
const CODE_BYTES_MAX: u64 = 64 << 20;

/// Indices of the parts of a quantized tensor.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Indices of the stored codes.
    pub codes: Vec<IndexRange>,
    /// Indices of the scales of the blocks that the codes are in.
    pub scales: Vec<IndexRange>,
    /// Shape of these scales, with the dimensions of [`grid`](Dequantized::grid).
    pub scales_shape: Vec<u64>,
    /// Indices of the global scales of the matrices that the codes are in.
    pub global_scale: Vec<IndexRange>,
    /// Row and column of the first number in the first block.
    pub begin: [u64; 2],
}

impl Dequantized {
    /// Returns the smallest region that contains another one, and that can be converted: all rows and columns between the
    /// first and the last, and whole bytes of codes.
    pub(super) fn covering(&self, region: &[IndexRange]) -> Vec<IndexRange> {
        let matrices = region.len().saturating_sub(2);
        let per_byte = self.scheme.codes_per_byte();
        let mut covering: Vec<IndexRange> = region.to_vec();
        for (dim, range) in covering.iter_mut().enumerate() {
            let unit = if dim + 1 == region.len() { per_byte } else { 1 };
            if dim >= matrices {
                let end = range.start + range.length.saturating_sub(1) * range.step + 1;
                let start = range.start / unit * unit;
                *range = IndexRange { start, length: end.div_ceil(unit) * unit - start, step: 1 };
            }
        }
        if self.codes_region(&covering).is_none()
            && let (Some(columns), Some(&size)) = (covering.last_mut(), self.shape.last())
        {
            // The bytes of a block are in a dimension of their own, and the region ends within a block.
            *columns = IndexRange::whole(size);
        }
        covering
    }

    /// Returns the index region of the stored codes, or `None` if it is not one.
    fn codes_region(&self, region: &[IndexRange]) -> Option<Vec<IndexRange>> {
        let per_byte = self.scheme.codes_per_byte();
        let mut bytes = region.to_vec();
        if let Some(columns) = bytes.last_mut() {
            *columns =
                IndexRange { start: columns.start / per_byte, length: columns.length / per_byte, step: columns.step };
        }
        if self.codes.shape == self.code_shape {
            return Some(bytes);
        }
        Layout::contiguous(&self.code_shape).index(&bytes).region(&self.codes.shape)
    }

    /// Splits a region into parts of bounded size, along with the memory of its numbers.
    pub(super) fn split(&self, region: Vec<IndexRange>, target: Elements) -> Vec<(Vec<IndexRange>, Elements)> {
        let lengths: Vec<u64> = region.iter().map(|range| range.length).collect();
        let bytes = numel(&lengths) / self.scheme.codes_per_byte();
        let columns = region.len().saturating_sub(1);
        let dim = lengths.iter().take(columns).position(|length| *length > 1);
        let Some((dim, length)) = dim.and_then(|dim| Some((dim, *lengths.get(dim)?))) else {
            return vec![(region, target)];
        };
        if bytes <= CODE_BYTES_MAX {
            return vec![(region, target)];
        }
        let part_length = (length * CODE_BYTES_MAX / bytes).max(1);
        let mut parts = Vec::new();
        let mut begin = 0;
        while begin < length {
            let count = part_length.min(length - begin);
            let mut part = region.clone();
            for range in part.iter_mut().skip(dim).take(1) {
                *range = IndexRange { start: range.start + begin * range.step, length: count, step: range.step };
            }
            let own = IndexRange { start: begin, length: count, step: 1 };
            let target = Elements { layout: target.layout.index_dim(dim, own), ..target.clone() };
            parts.extend(self.split(part, target));
            begin += count;
        }
        parts
    }

    /// Returns the parts of a region for which [`covering`](Dequantized::covering) returns the region itself.
    pub(super) fn parts(&self, region: &[IndexRange]) -> Parts {
        let whole = |shape: &[u64]| shape.iter().copied().map(IndexRange::whole).collect::<Vec<_>>();
        let codes = self.codes_region(region).unwrap_or_else(|| whole(&self.codes.shape));
        let matrices = region.len().saturating_sub(2);
        let is_single = |stored: &Stored| numel(&stored.shape) == 1;
        let mut cells = whole(&self.grid);
        let mut begin = [0; 2];
        if !is_single(&self.scales) {
            for (dim, (scale, range)) in cells.iter_mut().zip(region).enumerate() {
                // The last dimension has the columns, and the dimension before it the rows.
                let Some(axis) = (dim + 2).checked_sub(region.len()) else {
                    // All matrices share the scales of one.
                    if scale.length > 1 {
                        *scale = *range;
                    }
                    continue;
                };
                let block = self.block.get(axis).copied().unwrap_or(0);
                if let Some(first) = range.start.checked_div(block) {
                    let end = (range.start + range.length).div_ceil(block);
                    *scale = IndexRange { start: first, length: end - first, step: 1 };
                    if let Some(begin) = begin.get_mut(axis) {
                        *begin = range.start % block;
                    }
                }
            }
        }
        let global_scale = self.global_scale.as_ref().map_or_else(Vec::new, |stored| {
            let mut ranges = whole(&stored.shape);
            if !is_single(stored) {
                for (own, range) in ranges.iter_mut().zip(region.iter().take(matrices)) {
                    *own = *range;
                }
            }
            ranges
        });
        let scales_shape = cells.iter().map(|range| range.length).collect();
        let scales = match self.grid == self.scales.shape {
            true => cells,
            // They differ in dimensions of size 1 only.
            false => Layout::contiguous(&self.grid).index(&cells).region(&self.scales.shape).unwrap_or_default(),
        };
        Parts { codes, scales, scales_shape, global_scale, begin }
    }
}
