//! Units of the data of a file: parts of tensors that are read as a whole, to decrypt them or to compare their hashes.
//!
//! ```text
//! tensors  [        a        ]   [  b ][      c      ]
//! units    |  0  |  1  |  2  |   |  3  |  4  |  5  |6 |
//! ```
//!
//! Bytes between tensors belong to no unit.

use std::ops::Range;

/// Unit of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of its tensor among those with bytes.
    pub tensor: usize,
    /// Number of the unit in the tensor.
    pub index: u64,
    /// Number of the unit in the file.
    pub number: u64,
    /// Its bytes, from the start of the file.
    pub range: Range<u64>,
}

impl Unit {
    /// Returns whether these are as many bytes as the unit has.
    pub fn fits(&self, data: &[u8]) -> bool {
        u64::try_from(data.len()) == Ok(self.range.end - self.range.start)
    }
}

/// Units of a file. The last unit of a tensor has the rest of the tensor.
#[derive(Debug, PartialEq, Eq)]
pub struct Units {
    /// Tensors with bytes, in the order of the file.
    tensors: Vec<Tensor>,
    /// Size of the largest units that plans do not divide, in bytes.
    slot_bytes: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Tensor {
    range: Range<u64>,
    /// Size of all units but the last one, in bytes.
    unit_bytes: u64,
    /// Number of the first unit.
    first: u64,
}

impl Units {
    /// Returns the units of tensors at these ranges of the file, in ascending order, each with the size of its units, which
    /// is not zero. Plans divide units of more than `unit_bytes_max`, since slots would have to be as large.
    pub fn new(tensors: impl Iterator<Item = (Range<u64>, u64)>, unit_bytes_max: u64) -> Units {
        let mut next: u64 = 0;
        let tensor = |(range, unit_bytes): (Range<u64>, u64)| {
            let first = next;
            next = next.saturating_add((range.end - range.start).div_ceil(unit_bytes));
            Tensor { range, unit_bytes, first }
        };
        let tensors: Vec<_> = tensors.filter(|(range, _)| !range.is_empty()).map(tensor).collect();
        let sizes = tensors.iter().map(|tensor| tensor.unit_bytes).filter(|&bytes| bytes <= unit_bytes_max);
        let slot_bytes = sizes.max().unwrap_or(1);
        Units { tensors, slot_bytes }
    }

    /// Returns the size of the largest units that plans do not divide, in bytes.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Returns the unit with the byte at `offset`, or else the first one after it.
    pub fn at_or_after(&self, offset: u64) -> Option<Unit> {
        let index = self.tensors.partition_point(|tensor| tensor.range.end <= offset);
        let Tensor { range, unit_bytes, first } = self.tensors.get(index)?;
        let position = offset.saturating_sub(range.start) / unit_bytes;
        let begin = range.start.saturating_add(position.saturating_mul(*unit_bytes));
        let end = begin.saturating_add(*unit_bytes).min(range.end);
        Some(Unit { tensor: index, index: position, number: first.saturating_add(position), range: begin..end })
    }

    /// Returns the size of all units but the last one of the tensor at this byte, if plans do not divide them.
    pub fn unit_bytes(&self, begin: u64) -> Option<u64> {
        let index = self.tensors.partition_point(|tensor| tensor.range.start < begin);
        let tensor = self.tensors.get(index).filter(|tensor| tensor.range.start == begin)?;
        Some(tensor.unit_bytes).filter(|&bytes| bytes <= self.slot_bytes)
    }

    /// Returns the bytes of a tensor, from the start of the file.
    pub fn tensor(&self, index: usize) -> Option<Range<u64>> {
        self.tensors.get(index).map(|tensor| tensor.range.clone())
    }
}

/// Returns the number of units of tensors with these sizes in bytes. `unit_bytes` is not zero.
pub fn count(sizes: impl Iterator<Item = u64>, unit_bytes: u64) -> u64 {
    sizes.fold(0, |count, bytes| count.saturating_add(bytes.div_ceil(unit_bytes)))
}
