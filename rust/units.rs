//! Units of the data of a file: parts of tensors that are read as a whole, to decrypt them or to compare their hashes.
//!
//! ```text
//! tensors  [        a        ][  b ][      c      ]
//! units    |  0  |  1  |  2  |  3  |  4  |  5  |6 |
//! ```

use std::ops::Range;

/// Unit of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of the unit in the file.
    pub number: u64,
    /// Its bytes, from the start of the file.
    pub range: Range<u64>,
    /// The bytes of its tensor, from the start of the file.
    pub tensor: Range<u64>,
}

/// Units of a file. The last unit of a tensor has the rest of the tensor.
#[derive(Debug, PartialEq, Eq)]
pub struct Units {
    unit_bytes: u64,
    /// Range of each tensor with bytes, in the order of the file, and the number of its first unit.
    tensors: Vec<(Range<u64>, u64)>,
}

impl Units {
    /// Returns the units of tensors at these ranges of the file, in ascending order. `unit_bytes` is not zero.
    pub fn new(unit_bytes: u64, ranges: impl Iterator<Item = Range<u64>>) -> Units {
        let mut next: u64 = 0;
        let tensor = |range: Range<u64>| {
            let first = next;
            next = next.saturating_add((range.end - range.start).div_ceil(unit_bytes));
            (range, first)
        };
        Units { unit_bytes, tensors: ranges.filter(|range| !range.is_empty()).map(tensor).collect() }
    }

    /// Returns the size of all units but the last one of each tensor, in bytes.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Returns the unit with the byte at `offset`, or `None` if no unit has it.
    pub fn at(&self, offset: u64) -> Option<Unit> {
        let index = self.tensors.partition_point(|(range, _)| range.end <= offset);
        let (tensor, first) = self.tensors.get(index).filter(|(range, _)| range.contains(&offset))?;
        let position = (offset - tensor.start) / self.unit_bytes;
        let begin = tensor.start.saturating_add(position.saturating_mul(self.unit_bytes));
        let end = begin.saturating_add(self.unit_bytes).min(tensor.end);
        Some(Unit { number: first.saturating_add(position), range: begin..end, tensor: tensor.clone() })
    }
}

/// Returns the number of units of tensors with these sizes in bytes. `unit_bytes` is not zero.
pub fn count(sizes: impl Iterator<Item = u64>, unit_bytes: u64) -> u64 {
    sizes.fold(0, |count, bytes| count.saturating_add(bytes.div_ceil(unit_bytes)))
}
