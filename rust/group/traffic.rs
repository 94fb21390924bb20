//! What each rank reads, sends and gets in each window.

use super::line::Part;
use super::{Collective, Group, OwnShare};
use std::ops::Range;

/// Bytes `begin..end` of a share, counted in its contiguous form, as the file has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Whose share.
    pub rank: usize,
    /// Which of the wants of that rank.
    pub item: usize,
    /// The first byte.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// What a rank reads in a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outgoing {
    /// What it keeps, which goes straight where it belongs.
    pub kept: Vec<Piece>,
    /// What it sends, and where in the buffer that stands: one receiver's behind the other's.
    pub sent: Vec<(Piece, u64)>,
    /// Bytes for each receiver, or for all of them together where everybody gets the same.
    pub splits: Vec<u64>,
}

/// What a rank gets in a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Incoming {
    /// What it gets, and where in the buffer that stands: one sender's behind the other's.
    pub pieces: Vec<(Piece, u64)>,
    /// Bytes from each sender.
    pub splits: Vec<u64>,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

impl Group {
    /// How many windows there are: first those that end with an exchange, then those that end with a gathering.
    pub fn windows(&self) -> usize {
        let shared = self.exchange.windows() + self.gather.windows();
        let is_wanted = || self.tensors.iter().any(|tensor| !tensor.hull.is_empty());
        if shared == 0 { usize::from(is_wanted()) } else { shared }
    }

    /// What the ranks do after they have read a window.
    pub fn collective(&self, window: usize) -> Collective {
        if window < self.exchange.windows() {
            Collective::Exchange
        } else if window < self.exchange.windows() + self.gather.windows() {
            Collective::Gather
        } else {
            Collective::None
        }
    }

    /// What a rank reads in a window.
    pub fn outgoing(&self, rank: usize, window: usize) -> Outgoing {
        let kept = self.own(rank, window).into_iter().map(|(_, piece)| piece).collect();
        let mut outgoing = Outgoing { kept, ..Outgoing::default() };
        match self.collective(window) {
            Collective::None => {}
            Collective::Gather => {
                let range = self.gather_range(rank, window);
                for part in self.gather.parts(&self.tensors, range.clone()) {
                    let mine = self.pieces_of(&part, rank).next();
                    outgoing.sent.extend(mine.map(|piece| (piece, part.begin - range.start)));
                }
                outgoing.splits = vec![self.segment_bytes(window)];
            }
            Collective::Exchange => {
                let mut by_rank = vec![Vec::new(); self.ranks()];
                for part in self.exchange.parts(&self.tensors, self.exchange.window(&self.tensors, rank, window)) {
                    for piece in self.pieces(&part) {
                        if let Some(pieces) = by_rank.get_mut(piece.rank) {
                            pieces.push(piece);
                        }
                    }
                }
                if let Some(kept) = by_rank.get_mut(rank) {
                    outgoing.kept.append(kept);
                }
                let mut offset = 0;
                for pieces in by_rank {
                    let begin = offset;
                    for piece in pieces {
                        outgoing.sent.push((piece, offset));
                        offset += piece.bytes();
                    }
                    outgoing.splits.push(offset - begin);
                }
            }
        }
        outgoing
    }

    /// What a rank gets in a window.
    pub fn incoming(&self, rank: usize, window: usize) -> Incoming {
        let mut incoming = Incoming::default();
        let mut offset = 0;
        for sender in 0..self.ranks() {
            let begin = offset;
            match self.collective(window) {
                Collective::None => {}
                Collective::Gather => {
                    let range = self.gather_range(sender, window);
                    for part in self.gather.parts(&self.tensors, range.clone()) {
                        let mine = self.pieces_of(&part, rank).next();
                        incoming.pieces.extend(mine.map(|piece| (piece, begin + part.begin - range.start)));
                    }
                    offset += self.segment_bytes(window);
                }
                Collective::Exchange if sender == rank => {}
                Collective::Exchange => {
                    for part in self.exchange.parts(&self.tensors, self.exchange.window(&self.tensors, sender, window))
                    {
                        for piece in self.pieces_of(&part, rank) {
                            incoming.pieces.push((piece, offset));
                            offset += piece.bytes();
                        }
                    }
                }
            }
            incoming.splits.push(offset - begin);
        }
        incoming
    }

    /// The bytes of the files that a rank reads in a window: file, first byte, one past the last.
    pub fn reads(&self, rank: usize, window: usize) -> Vec<(usize, Range<u64>)> {
        let mut reads = Vec::new();
        for (share, piece) in self.own(rank, window) {
            let Some(tensor) = self.tensors.get(share.tensor) else { continue };
            let region = self.region(tensor, share.claim, rank);
            let at = |byte: u64| region.row_begin(byte / region.row_bytes) + byte % region.row_bytes;
            reads.push((tensor.source, at(piece.begin)..at(piece.end - 1) + 1));
        }
        let (line, range) = match self.collective(window) {
            Collective::None => return reads,
            Collective::Exchange => (&self.exchange, self.exchange.window(&self.tensors, rank, window)),
            Collective::Gather => (&self.gather, self.gather_range(rank, window)),
        };
        for part in line.parts(&self.tensors, range) {
            let source = self.tensors.get(part.tensor).map_or(0, |tensor| tensor.source);
            reads.push((source, part.range));
        }
        reads
    }

    /// For each rank how many bytes it sends to each rank in a window.
    pub fn sent_bytes(&self, window: usize) -> Vec<Vec<u64>> {
        let ranks = self.ranks();
        let mut sent = vec![vec![0; ranks]; ranks];
        for (sender, row) in sent.iter_mut().enumerate() {
            match self.collective(window) {
                Collective::None => {}
                Collective::Gather => {
                    let range = self.gather_range(sender, window);
                    let others = row.iter_mut().enumerate().filter(|(rank, _)| *rank != sender);
                    others.for_each(|(_, bytes)| *bytes = range.end - range.start);
                }
                Collective::Exchange => {
                    for part in self.exchange.parts(&self.tensors, self.exchange.window(&self.tensors, sender, window))
                    {
                        for piece in self.pieces(&part).filter(|piece| piece.rank != sender) {
                            if let Some(bytes) = row.get_mut(piece.rank) {
                                *bytes += piece.bytes();
                            }
                        }
                    }
                }
            }
        }
        sent
    }

    /// What every rank adds to a gathering, filled up where a rank has less.
    fn segment_bytes(&self, window: usize) -> u64 {
        self.gather.longest(&self.tensors, window - self.exchange.windows())
    }

    fn gather_range(&self, rank: usize, window: usize) -> Range<u64> {
        self.gather.window(&self.tensors, rank, window - self.exchange.windows())
    }

    /// What the shares have of a range of a file, in the order of the claims.
    fn pieces<'a>(&'a self, part: &'a Part) -> impl Iterator<Item = Piece> + 'a {
        let tensor = self.tensors.get(part.tensor).into_iter();
        tensor.flat_map(|tensor| self.shares(tensor)).filter_map(|(rank, item, region)| {
            let (begin, end) = (region.bytes_before(part.range.start), region.bytes_before(part.range.end));
            (begin < end).then_some(Piece { rank, item, begin, end })
        })
    }

    /// The same of one rank.
    fn pieces_of<'a>(&'a self, part: &'a Part, rank: usize) -> impl Iterator<Item = Piece> + 'a {
        let tensor = self.tensors.get(part.tensor).into_iter();
        tensor.flat_map(move |tensor| {
            self.claims_of(tensor, rank).filter_map(move |claim| {
                let region = self.region(tensor, claim, rank);
                let (begin, end) = (region.bytes_before(part.range.start), region.bytes_before(part.range.end));
                (begin < end).then_some(Piece { rank, item: claim.item, begin, end })
            })
        })
    }

    /// The part of what a rank reads for itself alone that it reads in a window: as much in each.
    fn own(&self, rank: usize, window: usize) -> Vec<(OwnShare, Piece)> {
        let shares = self.own_shares(rank);
        let total = shares.iter().map(|share| u128::from(share.bytes)).sum::<u128>();
        let number = |value: usize| u128::try_from(value).unwrap_or(u128::MAX);
        let cut = |window: usize| {
            let at = total * number(window) / number(self.windows()).max(1);
            u64::try_from(at).unwrap_or(u64::MAX)
        };
        let (from, to) = (cut(window), cut(window + 1));
        let mut pieces = Vec::new();
        let mut at = 0_u64;
        for &share in shares {
            let item_bytes = self.tensors.get(share.tensor).map_or(1, |tensor| tensor.item_bytes);
            let inside = |place: u64| {
                let inside = place.saturating_sub(at).min(share.bytes);
                // Both neighbours of a cut move it to the same element.
                if inside == share.bytes { inside } else { inside - inside % item_bytes }
            };
            let (begin, end) = (inside(from), inside(to));
            if begin < end {
                pieces.push((share, Piece { rank, item: share.claim.item, begin, end }));
            }
            at += share.bytes;
        }
        pieces
    }
}
