//! Windows of a save, chosen so that data in flight fit the buffers.

use super::writers::Writers;
use super::{SavePlan, Tensor};
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;

/// Largest number of windows. Each is a collective of all ranks, and takes memory of the plan.
const WINDOWS_MAX: u64 = 1 << 16;
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

/// Window that may still grow.
#[derive(Debug)]
struct OpenWindow {
    /// Bytes that any rank may send and receive.
    any: Bound,
    /// Further bytes that each rank may receive.
    received_by: Vec<u64>,
    received_by_max: u64,
    is_empty: bool,
}

impl OpenWindow {
    fn new(ranks: usize) -> OpenWindow {
        OpenWindow { any: Bound::default(), received_by: vec![0; ranks], received_by_max: 0, is_empty: true }
    }

    /// Returns the bounds of all bytes if a tensor with these writers is added, or with any writers.
    fn with(&self, bound: Bound, writers: Option<&[usize]>) -> Bound {
        let sent = self.any.sent.saturating_add(bound.sent);
        let received = match writers {
            None => self.any.received.saturating_add(bound.received).saturating_add(self.received_by_max),
            Some(writers) => {
                let of_writer = |&rank: &usize| self.received_by.get(rank).map_or(0, |bytes| bytes + bound.received);
                let most = writers.iter().map(of_writer).max().unwrap_or(0).max(self.received_by_max);
                self.any.received.saturating_add(most)
            }
        };
        Bound { sent, received }
    }

    fn add(&mut self, bound: Bound, writers: Option<&[usize]>) {
        self.is_empty = false;
        self.any.sent += bound.sent;
        let Some(writers) = writers else {
            self.any.received += bound.received;
            return;
        };
        for &rank in writers {
            if let Some(bytes) = self.received_by.get_mut(rank) {
                *bytes += bound.received;
                self.received_by_max = self.received_by_max.max(*bytes);
            }
        }
    }

    fn clear(&mut self) {
        self.any = Bound::default();
        self.received_by.fill(0);
        (self.received_by_max, self.is_empty) = (0, true);
    }
}

impl SavePlan {
    /// Assigns windows to the tensors and headers.
    ///
    /// # Errors
    /// `invalid-argument` if `window_bytes` is too small.
    pub(super) fn assign_windows(&mut self, window_bytes: u64) -> Result<()> {
        let block = self.block_bytes;
        // There are two buffers for each direction. The last block of a window may have bytes of later tensors.
        let room = window_bytes / 4;
        let fits = |bound: Bound| bound.sent.saturating_add(block) <= room && bound.received <= room;
        let too_small = |needed: Bound| {
            let needed = needed.sent.saturating_add(block).max(needed.received).saturating_mul(4);
            let message = format!("window_bytes is {window_bytes}; the save needs at least {needed}");
            Error::new(Kind::InvalidArgument, message)
        };
        let mut open = OpenWindow::new(self.ranks);
        let mut window: u64 = 0;
        let mut writers = Vec::new();
        let mut tensors = std::mem::take(&mut self.tensors);
        for file in &mut self.files {
            let header = Bound { sent: block, received: block };
            if !fits(header) {
                return Err(too_small(header));
            }
            if !fits(open.with(header, Some(&[0]))) {
                window += 1;
                open.clear();
            }
            open.add(header, Some(&[0]));
            file.window = to_usize(window);
            for tensor in tensors.get_mut(file.tensors.clone()).unwrap_or_default() {
                tensor.window = to_usize(window);
                if tensor.begin == tensor.end {
                    continue;
                }
                let bound = bound_of(&tensor.writers, &Cut::default(), block, self.ranks);
                if !fits(bound) {
                    window += u64::from(!open.is_empty);
                    tensor.window = to_usize(window);
                    let name = || file.layout.tensor_at(tensor.begin).unwrap_or_default();
                    tensor.cut = cut_of(&tensor.writers, block, self.ranks, fits)
                        .map_err(|needed| too_small(needed).tensor(name()))?;
                    window = window.saturating_add(tensor.cut.windows(tensor.writers.rows()));
                    open.clear();
                } else {
                    let counted = writers_of(tensor, &mut writers);
                    if !fits(open.with(bound, counted)) {
                        window += 1;
                        open.clear();
                        tensor.window = to_usize(window);
                    }
                    open.add(bound, counted);
                }
                if window > WINDOWS_MAX {
                    let message = format!(
                        "window_bytes is {window_bytes}, which divides the save into more than {WINDOWS_MAX} windows; pass \
                         a larger one"
                    );
                    return Err(Error::new(Kind::InvalidArgument, message));
                }
            }
        }
        self.tensors = tensors;
        self.windows = to_usize(window) + usize::from(!open.is_empty);
        Ok(())
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

/// Divides a tensor into windows as few as fit.
///
/// # Errors
/// The bounds of the smallest window, if it does not fit.
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

/// Returns the largest number up to `limit` that fits, or 0.
fn most(limit: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut fitting, mut above) = (0, limit.saturating_add(1));
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            above = middle;
        }
    }
    fitting
}
