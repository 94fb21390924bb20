//! Requested region of a tensor: the shape of the result, and the byte ranges in the file.
//!
//! An index region has one [`IndexRange`] per dimension. In the file its bytes form rows, which repeat with a stride for
//! each outer dimension that the region does not cover completely:
//!
//! ```text
//! [0:4, 1:3] of [4, 6]   .##....##....##....##...   rows of 2, repeated 4 times
//! [::2, 1:3] of [4, 6]   .##.........##.........    rows of 2, repeated twice
//! [0:2]      of [4, 6]   ############............   one row of 12
//! ```

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use std::ops::Range;

/// Requested indices of one dimension: `start`, `start + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexRange {
    /// First index.
    pub start: u64,
    /// Number of indices.
    pub length: u64,
    /// Distance between consecutive indices.
    pub step: u64,
}

impl IndexRange {
    /// Returns the range of all indices of a dimension.
    pub fn whole(size: u64) -> IndexRange {
        IndexRange { start: 0, length: size, step: 1 }
    }

    /// Returns whether the range lies inside a dimension of this size.
    pub(crate) fn fits(&self, size: u64) -> bool {
        let last = self.length.saturating_sub(1).checked_mul(self.step).and_then(|last| last.checked_add(self.start));
        // An empty range must still start inside the dimension or at its end.
        self.step > 0 && self.start <= size && (self.length == 0 || last.is_some_and(|last| last < size))
    }
}

/// Rows of bytes in a file, repeated with strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedRange {
    /// Offset of the first row, from the start of the file.
    pub begin: u64,
    /// Size of one row in bytes.
    pub row_bytes: u64,
    /// Strides from the outermost dimension to the innermost. Empty for a single row.
    pub strides: Vec<Stride>,
}

/// Repetition of the inner rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Number of repetitions, at least two.
    pub count: u64,
    /// Distance between the starts of consecutive repetitions in bytes.
    pub bytes: u64,
}

impl StridedRange {
    /// Returns the rows of an index region of a tensor at byte `begin` of a file. Each range lies inside its dimension.
    pub(crate) fn of(begin: u64, item_bytes: u64, shape: &[u64], index_ranges: &[IndexRange]) -> StridedRange {
        let mut range = StridedRange { begin, row_bytes: item_bytes, strides: Vec::new() };
        if index_ranges.iter().any(|index_range| index_range.length == 0) {
            return StridedRange { row_bytes: 0, ..range };
        }
        // From the innermost dimension outwards. No product exceeds the size of the tensor, which the checks of the
        // header have bounded.
        let mut index_bytes = item_bytes;
        for (index_range, size) in index_ranges.iter().zip(shape).rev() {
            range.begin = range.begin.saturating_add(index_range.start.saturating_mul(index_bytes));
            let stride = index_range.step.saturating_mul(index_bytes);
            match range.strides.last_mut() {
                _ if index_range.length == 1 => {}
                // Contiguous rows merge into one row.
                None if stride == range.row_bytes => {
                    range.row_bytes = range.row_bytes.saturating_mul(index_range.length)
                }
                // The outer repetition continues the inner stride.
                Some(last) if stride == last.count.saturating_mul(last.bytes) => {
                    last.count = last.count.saturating_mul(index_range.length);
                }
                _ => range.strides.push(Stride { count: index_range.length, bytes: stride }),
            }
            index_bytes = index_bytes.saturating_mul(*size);
        }
        range.strides.reverse();
        range
    }

    /// Returns the size of all rows in bytes.
    pub fn bytes(&self) -> u64 {
        self.row_bytes.saturating_mul(self.rows())
    }

    /// Returns the number of bytes of the rows before byte `offset` of the file. They are the first bytes of the result,
    /// since the result keeps the order of the file.
    pub fn bytes_before(&self, offset: u64) -> u64 {
        let mut left = offset.saturating_sub(self.begin);
        let mut inner_bytes = self.bytes();
        let mut before = 0;
        for stride in &self.strides {
            inner_bytes /= stride.count;
            let whole = left / stride.bytes;
            if whole >= stride.count {
                return before + inner_bytes * stride.count;
            }
            before += whole * inner_bytes;
            left -= whole * stride.bytes;
        }
        before + left.min(self.row_bytes)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.strides.iter().fold(1, |rows, stride| rows.saturating_mul(stride.count))
    }

    /// Returns the offset in the file after the last row.
    pub fn end(&self) -> u64 {
        self.row_begin(self.rows().saturating_sub(1)).saturating_add(self.row_bytes)
    }

    /// Returns the offset of a row, from the start of the file.
    pub fn row_begin(&self, row: u64) -> u64 {
        let step = |(begin, row): (u64, u64), stride: &Stride| {
            (begin.saturating_add(row % stride.count * stride.bytes), row / stride.count)
        };
        self.strides.iter().rev().fold((self.begin, row), step).0
    }
}

/// Requested region of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRegion {
    /// Name of the tensor.
    pub name: Box<str>,
    /// Index of the file that contains the tensor.
    pub source: usize,
    /// Offset of the tensor's first byte, from the start of the file.
    pub tensor_begin: u64,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Shape of the result, in PyTorch's elements.
    pub shape: Vec<u64>,
    /// Byte ranges in the file. Empty for a result without elements, and for a tensor that is stored without data, whose
    /// elements are zero.
    pub range: StridedRange,
}

impl TensorRegion {
    /// Returns the region of a whole tensor. Fails with `unsupported-dtype` if PyTorch cannot represent the tensor.
    pub fn whole(source: usize, entry: Entry<'_>) -> Result<TensorRegion> {
        let shape = torch_shape(entry)?;
        let row_bytes = entry.end.saturating_sub(entry.begin);
        let range = StridedRange { begin: entry.begin, row_bytes, strides: Vec::new() };
        Ok(TensorRegion {
            name: entry.name.into(),
            source,
            tensor_begin: entry.begin,
            dtype: entry.dtype,
            shape,
            range,
        })
    }

    /// Returns the region with these indices of each dimension of PyTorch's shape. Fails with `invalid-argument` if the
    /// number of ranges differs from the number of dimensions, or a range exceeds its dimension, and with the errors of
    /// [`TensorRegion::whole`].
    pub fn indexed(source: usize, entry: Entry<'_>, index_ranges: &[IndexRange]) -> Result<TensorRegion> {
        let whole = TensorRegion::whole(source, entry)?;
        let shape: Vec<u64> = index_ranges.iter().map(|index_range| index_range.length).collect();
        if whole.shape.len() != index_ranges.len() {
            let message = format!(
                "{} index ranges for a tensor with shape {:?}; give one for each dimension",
                index_ranges.len(),
                whole.shape
            );
            return Err(outside(entry, message));
        }
        for (dim, (index_range, &size)) in index_ranges.iter().zip(&whole.shape).enumerate() {
            if !index_range.fits(size) {
                let IndexRange { start, length, step } = index_range;
                let message = format!(
                    "{length} indices from {start} with step {step} do not lie inside dimension {dim}, whose size is \
                     {size}"
                );
                return Err(outside(entry, message));
            }
        }
        let range = match entry.begin == entry.end {
            true => whole.range,
            false => StridedRange::of(entry.begin, entry.dtype.item_bytes(), &whole.shape, index_ranges),
        };
        Ok(TensorRegion { shape, range, ..whole })
    }

    /// Returns how many bytes of the file the result has.
    pub fn bytes(&self) -> u64 {
        self.range.bytes()
    }

    /// Returns the byte range in the file, or `None` if the region is not contiguous there.
    pub fn contiguous(&self) -> Option<Range<u64>> {
        let StridedRange { begin, row_bytes, strides } = &self.range;
        strides.is_empty().then(|| *begin..begin.saturating_add(*row_bytes))
    }
}

fn outside(entry: Entry<'_>, message: String) -> Error {
    Error::new(Kind::InvalidArgument, message).tensor(entry.name).offset(entry.begin)
}

/// Returns the shape in PyTorch's elements. Fails with `unsupported-dtype` if PyTorch cannot represent the tensor.
pub(crate) fn torch_shape(entry: Entry<'_>) -> Result<Vec<u64>> {
    let unsupported =
        |message: String| Error::new(Kind::UnsupportedDtype, message).tensor(entry.name).offset(entry.begin);
    if entry.dtype.scalar_type().is_none() {
        return Err(unsupported(format!("PyTorch has no dtype for {}; load the other tensors by name", entry.dtype)));
    }
    let mut shape = entry.shape.to_vec();
    let packed = entry.dtype.packed_elements();
    if packed > 1 {
        let last = shape.last_mut().filter(|size| **size % packed == 0);
        let last = last.ok_or_else(|| {
            unsupported(format!(
                "PyTorch packs {packed} elements of {} into one, so the last dimension of {:?} must be a multiple of it",
                entry.dtype, entry.shape
            ))
        })?;
        *last /= packed;
    }
    Ok(shape)
}
