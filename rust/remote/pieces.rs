//! Memory for the bytes of one request.

use crate::num::{to_u64, to_usize};
use std::ops::Range;

/// Buffers for ranges of an object, in ascending order. One request brings the bytes of all of them, and those of the gaps
/// between them.
pub(super) struct Pieces<'a> {
    pieces: Vec<(u64, &'a mut [u8])>,
    range: Range<u64>,
    /// First byte of the object that has not arrived.
    reached: u64,
    /// Index of the first piece that is not full.
    next: usize,
    /// Bytes of gaps with their offsets, if they are kept.
    gaps: Option<Vec<(u64, Vec<u8>)>>,
}

impl<'a> Pieces<'a> {
    pub(super) fn one(offset: u64, into: &'a mut [u8]) -> Pieces<'a> {
        let range = offset..offset.saturating_add(to_u64(into.len()));
        Pieces { pieces: vec![(offset, into)], reached: offset, range, next: 0, gaps: None }
    }

    /// Joins ranges that follow each other with gaps of at most `gap_bytes` bytes.
    pub(super) fn join(ranges: impl Iterator<Item = (u64, &'a mut [u8])>, gap_bytes: u64) -> Vec<Pieces<'a>> {
        let mut joined: Vec<Pieces<'a>> = Vec::new();
        for (offset, into) in ranges.filter(|(_, into)| !into.is_empty()) {
            let last = joined.last_mut().filter(|last| {
                let end = last.range.end;
                (end..=end.saturating_add(gap_bytes)).contains(&offset)
            });
            match last {
                Some(last) => {
                    last.range.end = offset.saturating_add(to_u64(into.len()));
                    last.pieces.push((offset, into));
                }
                None => joined.push(Pieces::one(offset, into)),
            }
        }
        joined
    }

    /// Keeps the bytes of gaps, too, so that [`parts`](Pieces::parts) has all of the range.
    #[must_use]
    pub(super) fn with_gaps(self) -> Pieces<'a> {
        Pieces { gaps: Some(Vec::new()), ..self }
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    pub(super) fn reached(&self) -> u64 {
        self.reached
    }

    /// Takes the bytes that arrived next. Returns false, and takes none, if they are more than the range has.
    pub(super) fn write(&mut self, bytes: &[u8]) -> bool {
        if to_u64(bytes.len()) > self.range.end - self.reached {
            return false;
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some((offset, into)) = self.pieces.get_mut(self.next) else { return false };
            if let Some(gap) = offset.checked_sub(self.reached).filter(|gap| *gap > 0) {
                let (skipped, after) = rest.split_at(rest.len().min(to_usize(gap)));
                if let Some(gaps) = &mut self.gaps {
                    gaps.push((self.reached, skipped.to_vec()));
                }
                self.reached += to_u64(skipped.len());
                rest = after;
                continue;
            }
            let room = into.get_mut(to_usize(self.reached - *offset)..).unwrap_or_default();
            let (now, after) = rest.split_at(rest.len().min(room.len()));
            if let Some(target) = room.get_mut(..now.len()) {
                target.copy_from_slice(now);
            }
            if now.len() == room.len() {
                self.next += 1;
            }
            self.reached += to_u64(now.len());
            rest = after;
        }
        true
    }

    /// Iterates over the bytes of the range, in order. Those of gaps are missing unless they are kept.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let gaps = self.gaps.iter().flatten().map(|(offset, bytes)| (*offset, bytes.as_slice()));
        let mut parts: Vec<(u64, &[u8])> =
            self.pieces.iter().map(|(offset, into)| (*offset, &**into)).chain(gaps).collect();
        parts.sort_by_key(|(offset, _)| *offset);
        parts.into_iter().map(|(_, bytes)| bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::GAP_BYTES;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_get_their_bytes_however_these_are_cut(
            layout in prop::collection::vec((0_usize..20, 0_usize..30), 1..8),
            cuts in prop::collection::vec(1_usize..40, 1..20),
            is_far in prop::collection::vec(any::<bool>(), 8),
        ) {
            let byte = |offset: u64| u8::try_from(offset % 251).unwrap();
            let mut memory: Vec<Vec<u8>> = layout.iter().map(|(_, length)| vec![0; *length]).collect();
            let mut offsets = Vec::new();
            let mut end = 0;
            for ((gap, length), is_far) in layout.iter().zip(&is_far) {
                end += to_u64(*gap) + if *is_far { GAP_BYTES + 1 } else { 0 };
                offsets.push(end);
                end += to_u64(*length);
            }
            let ranges = offsets.iter().copied().zip(memory.iter_mut().map(Vec::as_mut_slice));
            let mut cuts = cuts.into_iter().cycle();
            for pieces in Pieces::join(ranges, GAP_BYTES) {
                let mut pieces = pieces.with_gaps();
                let range = pieces.range();
                while pieces.reached() < range.end {
                    let begin = pieces.reached();
                    let stop = range.end.min(begin + to_u64(cuts.next().unwrap()));
                    let bytes: Vec<u8> = (begin..stop).map(byte).collect();
                    prop_assert!(pieces.write(&bytes));
                    prop_assert_eq!(pieces.reached(), stop);
                }
                prop_assert!(!pieces.write(&[0]));
                let all: Vec<u8> = pieces.parts().flatten().copied().collect();
                prop_assert_eq!(all, range.map(byte).collect::<Vec<u8>>());
            }
            for (offset, bytes) in offsets.iter().zip(&memory) {
                let expected: Vec<u8> = (*offset..offset + to_u64(bytes.len())).map(byte).collect();
                prop_assert_eq!(bytes, &expected);
            }
        }
    }
}
