//! Positions and values of elements, applied to the blocks of a tensor in their order.

use super::Encoding;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use std::borrow::Cow;

/// New values of elements.
pub struct Elements<'a> {
    /// Ascending positions of 4 bytes.
    positions: Cow<'a, [u8]>,
    /// A value for each position.
    values: Cow<'a, [u8]>,
    item_bytes: usize,
    /// Number of the elements that were written.
    next: usize,
    /// Offsets of the first bytes of the elements that were written to the last block.
    written: Vec<u32>,
}

/// Returns the memory that applying the elements takes beside them, in bytes.
pub fn memory_bytes(encoding: Encoding, stored: &[u8], values_begin: usize) -> u64 {
    match encoding {
        Encoding::Raw if ascend(raw(stored.get(..values_begin).unwrap_or_default())) => 0,
        // An order, and the elements in it.
        Encoding::Raw => 2 * to_u64(stored.len()),
        // Positions of at most twice the size of the numbers.
        _ => 2 * to_u64(values_begin),
    }
}

impl<'a> Elements<'a> {
    /// Checks the elements of a tensor: positions in the encoding, and values from byte `values_begin` on. Fails with
    /// `malformed` for positions outside of the tensor, and for a position that occurs twice: the order of assignments
    /// would decide about its value.
    pub fn new(
        encoding: Encoding,
        stored: &'a [u8],
        values_begin: usize,
        item_bytes: usize,
        tensor_bytes: u64,
    ) -> Result<Elements<'a>> {
        let uneven = || Error::new(Kind::Malformed, "the sizes of the positions and of the values do not fit");
        let (positions, values) = stored.split_at_checked(values_begin).ok_or_else(uneven)?;
        let (count, items) = (values.len() / item_bytes, tensor_bytes / to_u64(item_bytes));
        let position_bytes = positions.len().checked_div(count).unwrap_or(size_of::<u32>());
        let widths: &[usize] = if encoding == Encoding::GapDelta { &[2, 4] } else { &[4] };
        if !widths.contains(&position_bytes)
            || (positions.len(), values.len()) != (count * position_bytes, count * item_bytes)
        {
            return Err(uneven());
        }
        let elements = |positions, values| Elements { positions, values, item_bytes, next: 0, written: Vec::new() };
        if encoding == Encoding::GapDelta {
            let narrow = positions.as_chunks().0.iter().map(|&gap| u16::from_le_bytes(gap).into());
            let positions = match position_bytes {
                2 => of_gaps(narrow, count, items)?,
                _ => of_gaps(raw(positions), count, items)?,
            };
            return Ok(elements(Cow::Owned(positions), Cow::Borrowed(values)));
        }
        let outside = |&(_, position): &(usize, u32)| u64::from(position) >= items || i32::try_from(position).is_err();
        if let Some((index, position)) = raw(positions).enumerate().find(outside) {
            let position = position.cast_signed();
            let message = format!("position number {index} is {position}, but the tensor has {items} elements");
            return Err(Error::new(Kind::Malformed, message));
        }
        if ascend(raw(positions)) {
            return Ok(elements(Cow::Borrowed(positions), Cow::Borrowed(values)));
        }
        let mut order: Vec<(u32, u32)> = raw(positions).zip(0..).collect();
        order.sort_unstable();
        let mut neighbors = order.iter().zip(order.iter().skip(1));
        if let Some(((position, first), (_, second))) = neighbors.find(|(before, after)| before.0 == after.0) {
            let message = format!("position {position} occurs twice, as numbers {first} and {second} of the positions");
            return Err(Error::new(Kind::Malformed, message));
        }
        let (mut sorted, mut sorted_values) = (Vec::with_capacity(positions.len()), Vec::with_capacity(values.len()));
        for (position, index) in order {
            let begin = to_usize(index.into()) * item_bytes;
            sorted.extend_from_slice(&position.to_le_bytes());
            sorted_values.extend_from_slice(values.get(begin..begin + item_bytes).ok_or_else(uneven)?);
        }
        Ok(elements(Cow::Owned(sorted), Cow::Owned(sorted_values)))
    }

    /// Writes the elements of the block that begins at byte `begin` of the tensor.
    pub fn apply(&mut self, begin: u64, block: &mut [u8]) {
        match self.item_bytes {
            1 => self.assign::<1>(begin, block),
            2 => self.assign::<2>(begin, block),
            4 => self.assign::<4>(begin, block),
            8 => self.assign::<8>(begin, block),
            _ => self.assign::<16>(begin, block),
        }
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.positions.len() / size_of::<u32>()
    }

    /// Returns the offsets of the first bytes of the elements that were written to the last block, in ascending order.
    pub fn written(&self) -> &[u32] {
        &self.written
    }

    fn assign<const ITEM: usize>(&mut self, begin: u64, block: &mut [u8]) {
        self.written.clear();
        let first = begin / to_u64(ITEM);
        let items = block.as_chunks_mut::<ITEM>().0;
        let end = first + to_u64(items.len());
        let positions = self.positions.as_chunks().0.get(self.next..).unwrap_or_default();
        let values = self.values.as_chunks::<ITEM>().0.get(self.next..).unwrap_or_default();
        let count = positions.partition_point(|&position| u64::from(u32::from_le_bytes(position)) < end);
        for (&position, value) in positions.iter().zip(values).take(count) {
            // Positions ascend, so none is before the block.
            let number = to_usize(u64::from(u32::from_le_bytes(position)) - first);
            if let Some(item) = items.get_mut(number) {
                *item = *value;
                self.written.extend(u32::try_from(number * ITEM));
            }
        }
        self.next += count;
    }
}

fn raw(positions: &[u8]) -> impl Iterator<Item = u32> {
    positions.as_chunks().0.iter().map(|&position| u32::from_le_bytes(position))
}

/// Returns whether each position is larger than the one before. Without a branch for each.
fn ascend(positions: impl Iterator<Item = u32>) -> bool {
    let (mut ascend, mut before) = (true, -1);
    for position in positions.map(i64::from) {
        ascend &= before < position;
        before = position;
    }
    ascend
}

/// Returns the positions after gaps.
fn of_gaps(gaps: impl Iterator<Item = u32>, count: usize, items: u64) -> Result<Vec<u8>> {
    let (mut positions, mut next) = (Vec::with_capacity(count * size_of::<u32>()), 0);
    for (index, gap) in gaps.enumerate() {
        let position = next + u64::from(gap);
        let inside = u32::try_from(position).ok().filter(|_| position < items).ok_or_else(|| {
            let message =
                format!("gap number {index} leads to position {position}, but the tensor has {items} elements");
            Error::new(Kind::Malformed, message)
        })?;
        positions.extend_from_slice(&inside.to_le_bytes());
        next = position + 1;
    }
    Ok(positions)
}
