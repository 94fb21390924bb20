//! Windows of a save, chosen so that data in flight fit the buffers.

use super::writers::Writers;
use super::{SavePlan, Tensor};
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::ranks::{check_windows, most};
use std::collections::HashSet;
use std::sync::Arc;

/// Number of writers up to which a window counts the bytes of each writer of a tensor.
const COUNTED_WRITERS_MAX: usize = 16;

/// Windows of one tensor: each has some rows of runs, or a slice of each part of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Number of rows of a window.
    rows: u64,
    /// Number of blocks of a slice.
    blocks: u64,
    /// Number of slices of a row.
    slices: u64,
}

impl Default for Cut {
    fn default() -> Cut {
        Cut { rows: u64::MAX, blocks: u64::MAX, slices: 1 }
    }
}

impl Cut {
    /// Returns the window of a block, counted from the first window of the tensor, given the row and the index of the block
    /// in its part.
    pub(super) fn window(&self, row: u64, block: u64) -> usize {
        to_usize((row / self.rows).saturating_mul(self.slices).saturating_add(block / self.blocks))
    }

    /// Returns the number of blocks of a slice of a part.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    fn windows(&self, rows: u64) -> u64 {
        rows.div_ceil(self.rows).saturating_mul(self.slices)
    }
}

/// Upper bounds of the bytes that a rank sends and receives in a window.
#[derive(Clone, Copy, Debug, Default)]
struct Bound {
    sent: u64,
    received: u64,
}

/// Windows that may still grow, one for each set of ranks that have tensors in common. The sets fill windows side by side,
/// so that the stages of a pipeline write at the same time.
struct OpenWindows {
    windows: Vec<OpenWindow>,
    /// Window of each rank's set, and further bytes that the rank may receive in it.
    received_by: Vec<(u64, u64)>,
}

/// Window of one set of ranks.
#[derive(Clone, Copy, Debug, Default)]
struct OpenWindow {
    window: u64,
    /// Bytes that any rank may send and receive.
    any: Bound,
    received_by_max: u64,
    is_empty: bool,
}

impl OpenWindow {
    fn at(window: u64) -> OpenWindow {
        OpenWindow { window, is_empty: true, ..OpenWindow::default() }
    }
}

impl OpenWindows {
    fn new(sets: usize, ranks: usize) -> OpenWindows {
        OpenWindows { windows: vec![OpenWindow::at(0); sets], received_by: vec![(0, 0); ranks] }
    }

    fn get(&self, set: usize) -> OpenWindow {
        self.windows.get(set).copied().unwrap_or_default()
    }

    /// Closes the window of a set and opens a later one.
    fn open(&mut self, set: usize, window: u64) {
        if let Some(open) = self.windows.get_mut(set) {
            *open = OpenWindow::at(window);
        }
    }

    fn received_by(&self, rank: usize, window: u64) -> u64 {
        self.received_by.get(rank).filter(|(of, _)| *of == window).map_or(0, |(_, bytes)| *bytes)
    }

    /// Returns the bounds of all bytes if a tensor with these writers is added to the window of a set, or with any writers.
    fn with(&self, set: usize, bound: Bound, writers: Option<&[usize]>) -> Bound {
        let open = self.get(set);
        let sent = open.any.sent.saturating_add(bound.sent);
        let received = match writers {
            None => open.any.received.saturating_add(bound.received).saturating_add(open.received_by_max),
            Some(writers) => {
                let of_writer = |&rank: &usize| self.received_by(rank, open.window) + bound.received;
                let most = writers.iter().map(of_writer).max().unwrap_or(0).max(open.received_by_max);
                open.any.received.saturating_add(most)
            }
        };
        Bound { sent, received }
    }

    fn add(&mut self, set: usize, bound: Bound, writers: Option<&[usize]>) {
        let mut open = self.get(set);
        open.is_empty = false;
        open.any.sent += bound.sent;
        match writers {
            None => open.any.received += bound.received,
            Some(writers) => {
                for &rank in writers {
                    let bytes = self.received_by(rank, open.window) + bound.received;
                    open.received_by_max = open.received_by_max.max(bytes);
                    if let Some(place) = self.received_by.get_mut(rank) {
                        *place = (open.window, bytes);
                    }
                }
            }
        }
        if let Some(place) = self.windows.get_mut(set) {
            *place = open;
        }
    }

    /// Returns the number of windows.
    fn count(&self) -> u64 {
        self.windows.iter().map(|open| open.window + u64::from(!open.is_empty)).max().unwrap_or(0)
    }
}

/// Sets of ranks that have tensors in common, directly or through other ranks.
struct RankSets(Vec<usize>);

impl RankSets {
    /// Finds the sets. Ranks that hold nothing are sets of their own.
    fn new(tensors: &[Tensor], ranks: usize) -> RankSets {
        let mut sets = RankSets((0..ranks).collect());
        let mut known = HashSet::new();
        for tensor in tensors {
            if known.insert(Arc::as_ptr(&tensor.writers)) {
                let regions = tensor.writers.regions();
                let mut holders = (0..regions.len()).flat_map(|region| regions.holders(region)).copied();
                let Some(first) = holders.next() else { continue };
                holders.for_each(|holder| sets.join(first, holder));
            }
        }
        sets
    }

    /// Returns the set of a rank, which has the number of one of its ranks.
    fn of(&mut self, rank: usize) -> usize {
        let mut set = rank;
        while let Some(&next) = self.0.get(set).filter(|&&next| next != set) {
            // Halves the path of later calls.
            let after = self.0.get(next).copied().unwrap_or(next);
            if let Some(place) = self.0.get_mut(set) {
                *place = after;
            }
            set = next;
        }
        set
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.of(a), self.of(b));
        if let Some(place) = self.0.get_mut(a.max(b)) {
            *place = a.min(b);
        }
    }

    fn of_tensor(&mut self, tensor: &Tensor) -> usize {
        let holder = tensor.writers.regions().holders(0).first().copied();
        holder.map_or(0, |holder| self.of(holder))
    }
}

impl SavePlan {
    /// Assigns windows to the tensors and headers. Fails with `invalid-argument` if `window_bytes` is too small.
    pub(super) fn assign_windows(&mut self, window_bytes: u64) -> Result<()> {
        let block = self.block_bytes;
        let mut tensors = std::mem::take(&mut self.tensors);
        let mut sets = RankSets::new(&tensors, self.ranks);
        // There are two buffers for each direction.
        let all_room = window_bytes / 4;
        let mut border = self.borders(&tensors, &mut sets).saturating_mul(block);
        if border > all_room / 8 {
            sets = RankSets(vec![0; self.ranks]);
            border = block;
        }
        let room = all_room.saturating_sub(border);
        let fits = |bound: Bound| bound.sent <= room && bound.received <= all_room;
        let too_small = |needed: Bound| {
            let needed = needed.sent.saturating_add(block).max(needed.received).saturating_mul(4);
            let message = format!("window_bytes is {window_bytes}; the save needs at least {needed}");
            Error::new(Kind::InvalidArgument, message)
        };
        let mut open = OpenWindows::new(self.ranks, self.ranks);
        let mut writers = Vec::new();
        for file in &mut self.files {
            let header = Bound { sent: block, received: block };
            if !fits(header) {
                return Err(too_small(header));
            }
            let set = sets.of(0);
            if !fits(open.with(set, header, Some(&[0]))) {
                open.open(set, open.get(set).window + 1);
            }
            open.add(set, header, Some(&[0]));
            file.window = to_usize(open.get(set).window);
            for tensor in tensors.get_mut(file.tensors.clone()).unwrap_or_default() {
                if tensor.begin == tensor.end {
                    continue;
                }
                let set = sets.of_tensor(tensor);
                let bound = bound_of(&tensor.writers, &Cut::default(), block, self.ranks);
                if fits(bound) {
                    let counted = writers_of(tensor, &mut writers);
                    if !fits(open.with(set, bound, counted)) {
                        open.open(set, open.get(set).window + 1);
                    }
                    open.add(set, bound, counted);
                    tensor.window = to_usize(open.get(set).window);
                } else {
                    let first = open.get(set).window + u64::from(!open.get(set).is_empty);
                    let name = || file.layout.tensor_at(tensor.begin).unwrap_or_default();
                    tensor.cut = cut_of(&tensor.writers, block, self.ranks, fits)
                        .map_err(|needed| too_small(needed).tensor(name()))?;
                    tensor.window = to_usize(first);
                    open.open(set, first.saturating_add(tensor.cut.windows(tensor.writers.rows())));
                }
                check_windows(open.get(set).window, window_bytes, "the save")?;
            }
        }
        self.tensors = tensors;
        self.windows = to_usize(open.count());
        Ok(())
    }

    /// Returns the largest number of blocks whose bytes a rank may send in a window of another set of ranks, or in the last
    /// block of a window.
    fn borders(&self, tensors: &[Tensor], sets: &mut RankSets) -> u64 {
        let mut borders = 1;
        for file in &self.files {
            let mut last = sets.of(0);
            for tensor in tensors.get(file.tensors.clone()).unwrap_or_default() {
                if tensor.begin < tensor.end {
                    let set = sets.of_tensor(tensor);
                    borders += u64::from(set != last);
                    last = set;
                }
            }
        }
        borders
    }
}

/// Returns the ranks that write a tensor, or `None` if they are many.
fn writers_of<'a>(tensor: &Tensor, list: &'a mut Vec<usize>) -> Option<&'a [usize]> {
    list.clear();
    let is_counted = tensor.writers.list_writers(tensor.position, COUNTED_WRITERS_MAX, list);
    is_counted.then_some(list)
}

/// Returns bounds of the bytes that a rank sends and receives in a window of a tensor.
fn bound_of(writers: &Writers, cut: &Cut, block: u64, ranks: usize) -> Bound {
    let runs = cut.rows.min(writers.rows()).saturating_mul(writers.parts_max);
    if writers.is_mixed {
        let part_blocks = writers.part_bytes_max.div_ceil(block);
        let received = runs.saturating_mul(part_blocks.min(cut.blocks)).saturating_mul(block);
        let sent = if cut.blocks < part_blocks {
            writers.held_bytes_max(cut.blocks.saturating_mul(block))
        } else {
            writers.row_bytes_max.saturating_mul(cut.rows.min(writers.rows()))
        };
        return Bound { sent, received };
    }
    // Bytes of the first block of a run may belong to the writer before, and bytes of its last block to a later tensor.
    let border = runs.saturating_mul(block);
    let is_everywhere = writers.regions().len() == 1 && writers.regions().holders(0).len() == ranks;
    Bound { sent: if is_everywhere { 0 } else { border }, received: border }
}

/// Divides a tensor into windows as few as fit. The error is the bounds of the smallest window, if it does not fit.
fn cut_of(
    writers: &Writers,
    block: u64,
    ranks: usize,
    fits: impl Fn(Bound) -> bool,
) -> std::result::Result<Cut, Bound> {
    let of_rows = |rows: u64| Cut { rows, ..Cut::default() };
    let rows = most(writers.rows(), |rows| fits(bound_of(writers, &of_rows(rows), block, ranks)));
    if rows > 0 {
        return Ok(of_rows(rows));
    }
    let part_blocks = writers.part_bytes_max.div_ceil(block);
    let of_blocks = |blocks: u64| Cut { rows: 1, blocks, slices: part_blocks.div_ceil(blocks) };
    let blocks = most(part_blocks, |blocks| fits(bound_of(writers, &of_blocks(blocks), block, ranks)));
    if blocks == 0 { Err(bound_of(writers, &of_blocks(1), block, ranks)) } else { Ok(of_blocks(blocks)) }
}
