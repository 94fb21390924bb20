//! Sets of ranges of bytes.

use std::ops::Range;

/// Size of an encoded range in bytes.
pub(super) const RANGE_BYTES: usize = 16;

/// Ranges in order, with a gap between each two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Merges ranges in any order. Returns `None` if one is empty or ends after `length`.
    pub(super) fn merge(mut ranges: Vec<Range<u64>>, length: u64) -> Option<Ranges> {
        ranges.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            if range.is_empty() || range.end > length {
                return None;
            }
            match merged.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => merged.push(range),
            }
        }
        Some(Ranges(merged))
    }

    /// Decodes and merges ranges. Returns `None` if the bytes are none, as after a write that was cut.
    pub fn decode(bytes: &[u8], length: u64) -> Option<Ranges> {
        let (records, rest) = bytes.as_chunks::<RANGE_BYTES>();
        let decode = |record: &[u8; RANGE_BYTES]| {
            let (numbers, _) = record.as_chunks::<8>();
            let number = |index: usize| numbers.get(index).map(|bytes| u64::from_le_bytes(*bytes)).unwrap_or_default();
            number(0)..number(1)
        };
        rest.is_empty().then(|| Ranges::merge(records.iter().map(decode).collect(), length)).flatten()
    }

    /// Encodes one range.
    pub fn encode(range: &Range<u64>) -> [u8; RANGE_BYTES] {
        let mut record = [0; RANGE_BYTES];
        let (begin, end) = record.split_at_mut(RANGE_BYTES / 2);
        begin.copy_from_slice(&range.start.to_le_bytes());
        end.copy_from_slice(&range.end.to_le_bytes());
        record
    }

    /// Returns whether all of the first `length` bytes are in the set.
    pub fn covers(&self, length: u64) -> bool {
        self.run(0) == (true, length)
    }

    /// Returns the number of bytes in the set.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns whether the byte at `offset` is in the set, and the offset up to which the following ones are or are not,
    /// too.
    pub fn run(&self, offset: u64) -> (bool, u64) {
        let next = self.0.partition_point(|range| range.end <= offset);
        match self.0.get(next) {
            Some(range) if range.start <= offset => (true, range.end),
            Some(range) => (false, range.start),
            None => (false, u64::MAX),
        }
    }
}
