//! Memory for the bytes of one request.

use crate::num::{to_u64, to_usize};
use crate::os::memory;
use std::ops::Range;

/// Number of bytes whose pages are made present at once, just before they are written: the processor's cache still has
/// the pages that the kernel has cleared, and the bytes after them arrive meanwhile.
const POPULATE_STEP: usize = 256 << 10;

/// Buffers for ranges of an object, in ascending order. One request brings the bytes of all of them, and of the gaps
/// between them.
pub struct Pieces<'a> {
    pieces: Vec<(u64, &'a mut [u8])>,
    range: Range<u64>,
    /// First byte of the object that has not arrived.
    reached: u64,
    /// Index of the first piece that is not full.
    next: usize,
    /// Number of bytes at the beginning of this piece whose memory is present.
    present: usize,
    /// Bytes of gaps with their offsets, if they are kept.
    gaps: Option<Vec<(u64, Vec<u8>)>>,
}

impl<'a> Pieces<'a> {
    /// Returns the memory of one range, which begins at `offset`.
    pub fn one(offset: u64, into: &'a mut [u8]) -> Pieces<'a> {
        let range = offset..offset.saturating_add(to_u64(into.len()));
        Pieces { pieces: vec![(offset, into)], reached: offset, range, next: 0, present: 0, gaps: None }
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
            let begin = to_usize(self.reached - *offset);
            if begin >= self.present {
                self.present = into.len().min(begin + POPULATE_STEP);
                memory::populate(into.get_mut(begin..self.present).unwrap_or_default());
            }
            let room = into.get_mut(begin..self.present).unwrap_or_default();
            let (now, after) = rest.split_at(rest.len().min(room.len()));
            if let Some(target) = room.get_mut(..now.len()) {
                target.copy_from_slice(now);
            }
            if begin + now.len() == into.len() {
                (self.next, self.present) = (self.next + 1, 0);
            }
            self.reached += to_u64(now.len());
            rest = after;
        }
        true
    }

    /// Iterates over the bytes of the range, in order. Bytes of gaps are missing unless they are kept.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let gaps = self.gaps.iter().flatten().map(|(offset, bytes)| (*offset, bytes.as_slice()));
        let mut parts: Vec<(u64, &[u8])> =
            self.pieces.iter().map(|(offset, into)| (*offset, &**into)).chain(gaps).collect();
        parts.sort_by_key(|(offset, _)| *offset);
        parts.into_iter().map(|(_, bytes)| bytes)
    }
}
