//! Ranges of rows or columns, block by block.

use std::ops::Range;

/// Parts of a range in each block, with the number of the block. Clones need no division.
#[derive(Clone)]
pub(super) struct Cut {
    next: usize,
    end: usize,
    /// Number of the next block.
    number: usize,
    /// First row or column after the next block.
    block_end: usize,
    block: usize,
}

impl Cut {
    /// Cuts a range of rows or columns. Row or column 0 is `begin` after the start of the first block.
    pub(super) fn new(range: Range<usize>, begin: usize, block: usize) -> Cut {
        let number = (begin + range.start).checked_div(block).unwrap_or_default();
        let block_end = if block == 0 { range.end } else { (number + 1).saturating_mul(block).saturating_sub(begin) };
        Cut { next: range.start, end: range.end, number, block_end, block }
    }
}

impl Iterator for Cut {
    type Item = (usize, Range<usize>);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let Cut { next, number, .. } = *self;
        if next >= self.end {
            return None;
        }
        let end = self.block_end.min(self.end);
        self.next = end;
        self.number += 1;
        self.block_end = self.block_end.saturating_add(self.block);
        Some((number, next..end))
    }
}
