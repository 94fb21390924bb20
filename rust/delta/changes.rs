//! Elements of a tensor that change.

use super::difference::Difference;
use crate::num::{to_u64, to_usize};

/// Size of a position in bytes.
const POSITION_BYTES: usize = size_of::<u32>();

/// New values of elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Numbers of the elements that change, in ascending order, or `None` if `values` has all elements.
    pub positions: Option<Vec<u32>>,
    /// Bytes of the values.
    pub values: Vec<u8>,
}

/// Collects the changes of a tensor. Takes at most the memory of the tensor.
pub struct Collector<'a> {
    old: &'a [u8],
    item_bytes: usize,
    changes: Changes,
    difference: Difference,
}

impl<'a> Collector<'a> {
    /// Begins with the old bytes of a tensor whose elements have `item_bytes`: 1, 2, 4, 8 or 16.
    pub fn new(old: &'a [u8], item_bytes: usize) -> Collector<'a> {
        let changes = Changes { positions: Some(Vec::new()), values: Vec::new() };
        let mut collector = Collector { old, item_bytes, changes, difference: Difference::default() };
        // Positions have 32 bits.
        if to_u64(old.len() / item_bytes) > u64::from(u32::MAX) + 1 {
            collector.keep_all();
        }
        collector
    }

    /// Prepares for up to `count` changes, so that memory does not grow step by step, and is not copied then.
    pub fn reserve(&mut self, count: usize) {
        if let Changes { positions: Some(positions), values } = &mut self.changes {
            let count = count.min(self.old.len() / (POSITION_BYTES + self.item_bytes));
            positions.reserve_exact(count);
            values.reserve_exact(count * self.item_bytes);
        }
    }

    /// Compares the new bytes that begin at byte `begin`. The bytes before were added. If the caller knows which bytes
    /// may differ, `candidates` are their offsets in `new`, in ascending order.
    pub fn add(&mut self, begin: usize, new: &[u8], candidates: Option<&[u32]>) {
        match self.item_bytes {
            1 => self.compare::<1>(begin, new, candidates),
            2 => self.compare::<2>(begin, new, candidates),
            4 => self.compare::<4>(begin, new, candidates),
            8 => self.compare::<8>(begin, new, candidates),
            _ => self.compare::<16>(begin, new, candidates),
        }
        let changed = self.changes.positions.as_ref().map_or(0, Vec::len);
        if changed > 0 && changed * (POSITION_BYTES + self.item_bytes) >= self.old.len() {
            self.keep_all();
        }
    }

    /// Returns the changes.
    pub fn finish(mut self) -> Changes {
        self.changes.positions.iter_mut().for_each(Vec::shrink_to_fit);
        self.changes.values.shrink_to_fit();
        self.changes
    }

    fn compare<const ITEM: usize>(&mut self, begin: usize, new: &[u8], candidates: Option<&[u32]>) {
        let old = self.old.get(begin..begin + new.len()).unwrap_or_default();
        let Changes { positions, values } = &mut self.changes;
        let Some(positions) = positions else {
            if let Some(values) = values.get_mut(begin..begin + new.len()) {
                values.copy_from_slice(new);
            }
            return;
        };
        let changed = match candidates {
            Some(candidates) => self.difference.find_among::<ITEM>(old, new, candidates),
            None => self.difference.find::<ITEM>(old, new),
        };
        let items = new.as_chunks::<ITEM>().0;
        let first = u32::try_from(begin / ITEM).unwrap_or(u32::MAX);
        positions.extend(changed.iter().map(|number| first + number));
        let end = values.len();
        values.resize(end + changed.len() * ITEM, 0);
        let added = values.get_mut(end..).unwrap_or_default().as_chunks_mut::<ITEM>().0;
        for (value, &number) in added.iter_mut().zip(changed) {
            *value = items.get(to_usize(number.into())).copied().unwrap_or([0; ITEM]);
        }
    }

    /// Continues with the values of all elements.
    fn keep_all(&mut self) {
        let mut all = self.old.to_vec();
        let positions = self.changes.positions.take().unwrap_or_default();
        for (position, value) in positions.into_iter().zip(self.changes.values.chunks_exact(self.item_bytes)) {
            let begin = to_usize(position.into()) * self.item_bytes;
            if let Some(item) = all.get_mut(begin..begin + self.item_bytes) {
                item.copy_from_slice(value);
            }
        }
        self.changes.values = all;
    }
}
