//! Memory for the bytes of one request.

use crate::num::{to_u64, to_usize};
use crate::os::memory;
use std::ops::Range;

/// Number of bytes whose pages are present, at least, before the next ones are received, and at most twice as many: the
/// processor's cache still has the pages that the kernel has cleared, and the bytes after them arrive meanwhile.
const POPULATE_STEP: usize = 256 << 10;
/// Number of bytes of a gap that are received at once.
const GAP_STEP: usize = 64 << 10;

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
    /// Memory for bytes of gaps.
    gap: Vec<u8>,
    /// Bytes of gaps with their offsets, if they are kept.
    gaps: Option<Vec<(u64, Vec<u8>)>>,
}

impl<'a> Pieces<'a> {
    /// Returns the memory of one range, which begins at `offset`.
    pub fn one(offset: u64, into: &'a mut [u8]) -> Pieces<'a> {
        let range = offset..offset.saturating_add(to_u64(into.len()));
        Pieces {
            pieces: vec![(offset, into)],
            reached: offset,
            range,
            next: 0,
            present: 0,
            gap: Vec::new(),
            gaps: None,
        }
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
            let room = self.room();
            let (now, after) = rest.split_at(rest.len().min(room.len()));
            let Some(target) = room.get_mut(..now.len()).filter(|target| !target.is_empty()) else { return false };
            target.copy_from_slice(now);
            rest = after;
            self.advance(now.len());
        }
        true
    }

    /// Returns memory for the bytes that arrive next: of a piece, or for a gap. It is empty at the end of the range.
    pub(super) fn room(&mut self) -> &mut [u8] {
        let Some((offset, into)) = self.pieces.get_mut(self.next) else { return &mut [] };
        if let Some(gap) = offset.checked_sub(self.reached).filter(|gap| *gap > 0) {
            self.gap.resize(GAP_STEP.min(to_usize(gap)), 0);
            return &mut self.gap;
        }
        let begin = to_usize(self.reached - *offset);
        if self.present < into.len() && self.present - begin < POPULATE_STEP {
            let end = into.len().min(begin + 2 * POPULATE_STEP);
            memory::populate(into.get_mut(self.present..end).unwrap_or_default());
            self.present = end;
        }
        into.get_mut(begin..self.present).unwrap_or_default()
    }

    /// Takes the first `count` bytes of the [`room`](Pieces::room) as arrived.
    pub(super) fn advance(&mut self, count: usize) {
        let Some((offset, into)) = self.pieces.get(self.next) else { return };
        if *offset > self.reached {
            if let Some(gaps) = &mut self.gaps {
                gaps.push((self.reached, self.gap.get(..count).unwrap_or_default().to_vec()));
            }
        } else if self.reached + to_u64(count) == offset.saturating_add(to_u64(into.len())) {
            (self.next, self.present) = (self.next + 1, 0);
        }
        self.reached += to_u64(count);
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
