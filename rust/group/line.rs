//! Tensors one behind the other, whose bytes ranks read in turn.

use super::{Density, Tensor, Way};
use std::ops::Range;

/// What the ranks do with what they have read in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Nothing: each has read for itself alone.
    None,
    /// Everyone sends to everyone what that one wants.
    Exchange,
    /// Everyone sends the same to all.
    Gather,
}

/// The wanted bytes of some tensors, in the order of the files.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Places among the tensors of the plan.
    tensors: Vec<usize>,
    /// Where each begins on the line, and where the last one ends.
    begins: Vec<u64>,
    /// For each rank where its windows begin, and where the last one ends.
    cuts: Vec<Vec<u64>>,
}

/// A range of one tensor's file.
pub(super) struct Part {
    /// Its place among the tensors of the plan.
    pub(super) tensor: usize,
    /// Bytes of the file.
    pub(super) range: Range<u64>,
    /// Where on the line it begins.
    pub(super) begin: u64,
}

impl Line {
    pub(super) fn of(tensors: &[Tensor], way: Way) -> Line {
        let mut line = Line { begins: vec![0], ..Line::default() };
        let mut end = 0;
        for (place, tensor) in tensors.iter().enumerate() {
            if tensor.way == way {
                end += tensor.hull.end - tensor.hull.start;
                line.tensors.push(place);
                line.begins.push(end);
            }
        }
        line
    }

    pub(super) fn bytes(&self) -> u64 {
        self.begins.last().copied().unwrap_or(0)
    }

    /// How many windows the rank with the most has.
    pub(super) fn windows(&self) -> usize {
        self.cuts.iter().map(|cuts| cuts.len().saturating_sub(1)).max().unwrap_or(0)
    }

    /// What a rank reads in a window. Empty where others still have something to read, and it has not.
    pub(super) fn window(&self, rank: usize, window: usize) -> Range<u64> {
        let cuts = self.cuts.get(rank).map_or(&[][..], Vec::as_slice);
        match cuts.get(window..window + 2) {
            Some(&[begin, end]) => begin..end,
            _ => 0..0,
        }
    }

    /// The longest window of any rank.
    pub(super) fn longest(&self, window: usize) -> u64 {
        let length = |rank| {
            let range = self.window(rank, window);
            range.end - range.start
        };
        (0..self.cuts.len()).map(length).max().unwrap_or(0)
    }

    /// Gives each rank as many bytes as its share, one behind the other, and cuts them into windows: in none has any
    /// rank more to get from this one than `step` bytes, as far as whole rows have that density.
    pub(super) fn cut(&mut self, tensors: &[Tensor], shares: &[u64], density: impl Fn(&Tensor) -> Density, step: u64) {
        let mut end = 0_u64;
        let mut cuts = Vec::with_capacity(shares.len());
        for share in shares {
            let begin = self.aligned(tensors, end);
            end += share;
            cuts.push(self.windows_of(tensors, begin..self.aligned(tensors, end), &density, step));
        }
        self.cuts = cuts;
    }

    fn windows_of(
        &self,
        tensors: &[Tensor],
        range: Range<u64>,
        density: impl Fn(&Tensor) -> Density,
        step: u64,
    ) -> Vec<u64> {
        let mut cuts = vec![range.start];
        let mut room = u128::from(step);
        for part in self.parts(tensors, range.clone()) {
            let Some(tensor) = tensors.get(part.tensor) else { continue };
            let Density { wanted, of } = density(tensor);
            let (wanted, of) = (u128::from(wanted.max(1)), u128::from(of.max(1)));
            let mut left = part.range.end - part.range.start;
            while left > 0 {
                let at = part.begin + (part.range.end - part.range.start) - left;
                let fitting = u64::try_from(room * of / wanted).unwrap_or(u64::MAX);
                if fitting >= left {
                    room = room.saturating_sub((u128::from(left) * wanted).div_ceil(of));
                    break;
                }
                let mut taken = fitting - fitting % tensor.item_bytes;
                if taken == 0 && cuts.last() == Some(&at) {
                    // An element always fits.
                    taken = tensor.item_bytes.min(left);
                }
                cuts.push(at + taken);
                left -= taken;
                room = u128::from(step);
            }
        }
        if cuts.last() != Some(&range.end) {
            cuts.push(range.end);
        }
        cuts
    }

    /// The ranges of the files that a range of the line stands for.
    pub(super) fn parts<'a>(&'a self, tensors: &'a [Tensor], range: Range<u64>) -> impl Iterator<Item = Part> + 'a {
        let first = self.begins.partition_point(|&begin| begin <= range.start).saturating_sub(1);
        let end = range.end;
        let members = self.tensors.iter().zip(&self.begins).skip(first);
        members.take_while(move |&(_, &begin)| begin < end).filter_map(move |(&place, &begin)| {
            let tensor = tensors.get(place)?;
            let length = tensor.hull.end - tensor.hull.start;
            let (from, to) = (range.start.max(begin), end.min(begin + length));
            let file = |at: u64| tensor.hull.start + (at - begin);
            (from < to).then(|| Part { tensor: place, range: file(from)..file(to), begin: from })
        })
    }

    /// The nearest place before that cuts no element.
    fn aligned(&self, tensors: &[Tensor], at: u64) -> u64 {
        let index = self.begins.partition_point(|&begin| begin <= at).saturating_sub(1);
        let begin = self.begins.get(index).copied().unwrap_or(0);
        let item_bytes = self.tensors.get(index).and_then(|&place| tensors.get(place)).map_or(1, |t| t.item_bytes);
        at - (at - begin) % item_bytes.max(1)
    }
}
