//! From what is wanted and where it should go to reads and placements. Pure:
//! no files, no threads, no clock, so that its promises can be tested over any
//! input: each byte of each destination is written exactly once, and no byte
//! outside the data of the wanted tensors' files is read.
//!
//! ```text
//! file   ....[ a ][b][   c, larger than a chunk        ]...[ rows of d ]
//!             `--chunk 0--' `-chunk 1-' `-chunk 2-'
//! chunk  a chunk is what is read at once: one or more reads, and the
//!        placements that say which of its bytes go to which address
//! ```

mod run;

use self::run::{Run, push_runs, sort, split_shared_rows, with_sharing};
use crate::checkpoint::region::TensorRegion;
use crate::convert::cast::Cast;
use crate::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::ops::Range;

/// Where bytes `begin..end` of a wanted tensor go, counted in its contiguous form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The position in the list of wanted tensors.
    pub tensor: usize,
    /// The first byte of the tensor that goes there.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
    /// The address of the first byte, on the host or on a device.
    pub address: u64,
    /// What becomes of the elements on the way.
    pub cast: Option<Cast>,
}

/// What the plan must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a chunk, at least the alignment and eight more, so that an element always fits.
    pub chunk_bytes: u64,
    /// Bytes that nobody wants are read too where a gap is no longer than this, since another read costs more.
    pub gap_bytes: u64,
    /// Pieces of at least this size are read straight into place. `None` where only the device can write there, or
    /// where reads cannot begin at any byte.
    pub in_place_bytes: Option<u64>,
    /// A reader may widen each read to multiples of this in the file, and in the slot has the room for it. 1 where
    /// reads begin and end anywhere; `chunk_bytes` is a multiple of it, and no gap is shorter.
    pub alignment: u64,
    /// The most placements of a chunk.
    pub copies_max: usize,
}

impl Limits {
    /// How much of a row at `begin` one chunk can hold, in whole elements.
    fn part_bytes(&self, begin: u64, item_bytes: u64) -> u64 {
        let room = self.chunk_bytes - begin % self.alignment;
        room - room % item_bytes
    }

    /// A row of this size fits a chunk wherever in the file it begins.
    fn row_bytes_max(&self) -> u64 {
        self.chunk_bytes - (self.alignment - 1)
    }

    /// Whether rows with this stride are read with what lies between them.
    fn are_near(&self, row_bytes: u64, stride: u64) -> bool {
        stride - row_bytes <= self.gap_bytes && stride <= self.chunk_bytes
    }

    /// Near rows are cut where the file is a multiple of this, so that all who want columns of the same rows cut them
    /// alike, and so far below a chunk that the last row still fits. `None` for rows of which hardly one would.
    fn cell_bytes(&self, stride: u64) -> Option<u64> {
        let room = self.row_bytes_max();
        (stride <= room / 2).then(|| room - stride)
    }

    /// How many rows of a run that begins there begin in the same cell.
    fn rows_in_cell(&self, begin: u64, row_bytes: u64, stride: u64) -> u64 {
        let cell = self.cell_bytes(stride).filter(|_| self.are_near(row_bytes, stride));
        cell.map_or(u64::MAX, |cell| (cell - begin % cell).div_ceil(stride))
    }
}

/// What is read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// One read straight to a host address.
    InPlace {
        /// The wanted tensor.
        tensor: usize,
        /// The file.
        source: usize,
        /// The first byte in the file.
        offset: u64,
        /// Bytes.
        length: usize,
        /// Where they go.
        address: u64,
    },
    /// Reads into a slot, whose bytes are then placed.
    Staged {
        /// The file.
        source: usize,
        /// Bytes of the slot that the reads, widened to the alignment, may fill.
        bytes: usize,
        /// In the order of the file, and of the slot.
        reads: Vec<Read>,
        /// Where the bytes go.
        copies: Vec<SlotCopy>,
    },
}

impl Chunk {
    /// The wanted tensor of each placement, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = usize> + '_ {
        let (in_place, staged) = match self {
            Chunk::InPlace { tensor, .. } => (Some(*tensor), &[][..]),
            Chunk::Staged { copies, .. } => (None, copies.as_slice()),
        };
        in_place.into_iter().chain(staged.iter().map(|copy| copy.tensor))
    }
}

/// One read into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The first byte in the file.
    pub offset: u64,
    /// The first byte in the slot.
    pub slot_begin: usize,
    /// Bytes.
    pub length: usize,
}

impl Read {
    /// The part of this read that has these bytes of the file, if it has them.
    pub fn part(&self, range: Range<u64>) -> Option<Read> {
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let before = usize::try_from(range.start.checked_sub(self.offset)?).ok()?;
        let fits = before.checked_add(length)? <= self.length;
        fits.then(|| Read { offset: range.start, slot_begin: self.slot_begin + before, length })
    }
}

/// Rows of bytes in a slot that go, one behind the other, to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// The wanted tensor.
    pub tensor: usize,
    /// The first byte in the slot.
    pub slot_begin: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// How many rows.
    pub rows: usize,
    /// Bytes from the start of a row in the slot to the start of the next.
    pub slot_stride: usize,
    /// Where the first row goes.
    pub address: u64,
    /// What becomes of the elements.
    pub cast: Option<Cast>,
}

impl SlotCopy {
    /// What is taken out of the slot, in bytes.
    pub fn bytes(&self) -> usize {
        self.row_bytes.saturating_mul(self.rows)
    }

    /// Takes in the row that follows where this one goes, if the two also lie evenly in the slot.
    fn grow(&mut self, row: &SlotCopy) -> bool {
        let target = u64::try_from(self.target_row_bytes().saturating_mul(self.rows)).unwrap_or(u64::MAX);
        if (row.tensor, row.cast) != (self.tensor, self.cast) || row.address != self.address.saturating_add(target) {
            return false;
        }
        if self.rows == 1 && row.slot_begin == self.slot_begin + self.row_bytes {
            self.row_bytes += row.row_bytes;
            self.slot_stride = self.row_bytes;
            return true;
        }
        let stride = if self.rows == 1 { row.slot_begin.saturating_sub(self.slot_begin) } else { self.slot_stride };
        let follows = row.row_bytes == self.row_bytes && row.slot_begin == self.slot_begin + stride * self.rows;
        if follows {
            self.slot_stride = stride;
            self.rows += 1;
        }
        follows
    }

    /// Bytes of a row where it goes.
    pub fn target_row_bytes(&self) -> usize {
        to_usize(bytes_after(self.cast, u64::try_from(self.row_bytes).unwrap_or(u64::MAX)))
    }
}

/// Plans how to fill `destinations`.
///
/// # Errors
/// `internal` for a destination that is not inside its tensor, which is a bug of the caller.
pub fn plan(regions: &[TensorRegion], destinations: &[Destination], limits: &Limits) -> Result<Vec<Chunk>> {
    let mut runs = Vec::with_capacity(destinations.len());
    for destination in destinations {
        let outside = || Error::new(Kind::Internal, format!("{destination:?} is not inside a wanted tensor"));
        let region = regions.get(destination.tensor).ok_or_else(outside)?;
        if destination.begin > destination.end || destination.end > region.bytes() {
            return Err(outside());
        }
        let item_bytes = region.dtype.item_bytes();
        let is_cut = |edge: u64| !edge.is_multiple_of(item_bytes);
        if destination.cast.is_some() && (is_cut(destination.begin) || is_cut(destination.end)) {
            return Err(Error::new(Kind::Internal, format!("{destination:?} is cast, but cuts an element")));
        }
        push_runs(region, destination, limits, &mut runs);
    }
    sort(&mut runs);
    split_shared_rows(&mut runs, limits);
    let mut planner = Planner { limits, chunks: Vec::new(), open: None };
    for (run, is_shared) in with_sharing(&runs) {
        planner.add(*run, is_shared);
    }
    planner.close();
    Ok(planner.chunks)
}

struct Planner<'a> {
    limits: &'a Limits,
    chunks: Vec<Chunk>,
    open: Option<OpenChunk>,
}

/// A staged chunk that may still grow.
#[derive(Default)]
struct OpenChunk {
    source: usize,
    bytes: u64,
    reads: Vec<OpenRead>,
    copies: Vec<SlotCopy>,
    /// For each wanted tensor of which rows are placed one by one, where the last placement of those is.
    growing: HashMap<usize, usize>,
}

struct OpenRead {
    offset: u64,
    slot_begin: u64,
    length: u64,
}

impl Planner<'_> {
    /// What is `is_shared` has bytes that another run wants too; both are placed from one chunk, read once.
    fn add(&mut self, run: Run, is_shared: bool) {
        let is_large = self.limits.in_place_bytes.is_some_and(|least| run.row_bytes >= least);
        if is_large && !is_shared && run.cast.is_none() {
            self.add_in_place(run);
        } else if run.rows == 1 || run.is_far_apart(self.limits) {
            self.add_rows_one_by_one(run);
        } else {
            if is_shared {
                self.make_room_for_cell(&run);
            }
            self.add_rows_with_gaps(run);
        }
    }

    fn add_in_place(&mut self, run: Run) {
        self.close();
        for row in 0..run.rows {
            self.chunks.push(Chunk::InPlace {
                tensor: run.tensor,
                source: run.source,
                offset: run.begin + row * run.stride,
                length: to_usize(run.row_bytes),
                address: run.address + row * run.row_bytes,
            });
        }
    }

    /// Whoever wants other columns of the rows of this run comes next, and finds all of them in one chunk.
    fn make_room_for_cell(&mut self, run: &Run) {
        let Some(cell) = self.limits.cell_bytes(run.stride) else { return };
        let needed = cell - run.begin % cell + run.stride;
        let has_room = self.open.as_ref().is_some_and(|open| {
            open.source == run.source && open.bytes_before(run.begin, self.limits) + needed <= self.limits.chunk_bytes
        });
        if !has_room {
            self.close();
        }
    }

    /// Rows so near to each other that one read takes them with what lies between.
    fn add_rows_with_gaps(&mut self, run: Run) {
        let mut row = 0;
        while row < run.rows {
            let begin = run.begin + row * run.stride;
            let room = self.room_at(run.source, begin, run.row_bytes);
            let rows = ((room - run.row_bytes) / run.stride + 1).min(run.rows - row);
            let slot_begin = self.read(run.source, begin, (rows - 1) * run.stride + run.row_bytes);
            self.place(&run, slot_begin, row, rows, run.stride);
            row += rows;
        }
    }

    /// Rows with a read for each, unless they follow what is read anyway. One copy places those that come to lie
    /// evenly in the slot.
    fn add_rows_one_by_one(&mut self, run: Run) {
        for row in 0..run.rows {
            let slot_begin = self.read(run.source, run.begin + row * run.stride, run.row_bytes);
            if run.row_bytes == run.stride {
                self.place(&run, slot_begin, row, 1, run.row_bytes);
            } else {
                self.place_row(&run, slot_begin, row);
            }
        }
    }

    /// How many bytes from `begin` on the open chunk could still take, or a new one where it could not take `least`.
    fn room_at(&self, source: usize, begin: u64, least: u64) -> u64 {
        let room = match &self.open {
            Some(open) if open.source == source && !open.is_full(self.limits) => {
                self.limits.chunk_bytes.saturating_sub(open.bytes_before(begin, self.limits))
            }
            _ => 0,
        };
        if room < least { self.limits.chunk_bytes - begin % self.limits.alignment } else { room }
    }

    /// Makes sure that the open chunk reads this range, and says where in the slot it lies.
    fn read(&mut self, source: usize, begin: u64, length: u64) -> u64 {
        let fits = self.open.as_ref().is_some_and(|open| {
            open.source == source
                && !open.is_full(self.limits)
                && open.bytes_before(begin, self.limits) + length <= self.limits.chunk_bytes
        });
        if !fits {
            self.close();
        }
        let open = self.open.get_or_insert_with(|| OpenChunk { source, ..OpenChunk::default() });
        open.read(begin, length, self.limits)
    }

    /// Places `rows` rows of the run, from its row `row` on, which lie in the slot of the open chunk.
    fn place(&mut self, run: &Run, slot_begin: u64, row: u64, rows: u64, slot_stride: u64) {
        let Some(open) = &mut self.open else { return };
        open.copies.push(run.slot_copy(slot_begin, row, rows, slot_stride));
    }

    /// Places one row of the run, together with those before it where that is possible.
    fn place_row(&mut self, run: &Run, slot_begin: u64, row: u64) {
        let Some(open) = &mut self.open else { return };
        let copy = run.slot_copy(slot_begin, row, 1, run.row_bytes);
        let last = open.growing.get(&run.tensor).and_then(|&index| open.copies.get_mut(index));
        if !last.is_some_and(|last| last.grow(&copy)) {
            open.growing.insert(run.tensor, open.copies.len());
            open.copies.push(copy);
        }
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            let read = |read: &OpenRead| Read {
                offset: read.offset,
                slot_begin: to_usize(read.slot_begin),
                length: to_usize(read.length),
            };
            self.chunks.push(Chunk::Staged {
                source: open.source,
                bytes: to_usize(open.bytes),
                reads: open.reads.iter().map(read).collect(),
                copies: open.copies,
            });
        }
    }
}

impl OpenChunk {
    fn is_full(&self, limits: &Limits) -> bool {
        self.copies.len() >= limits.copies_max
    }

    /// Bytes of the slot before the place that a read of the file at `begin` would get.
    fn bytes_before(&self, begin: u64, limits: &Limits) -> u64 {
        match self.reads.last() {
            Some(last) if last.reaches(begin, limits) => last.slot_begin + (begin - last.offset),
            _ => self.bytes + begin % limits.alignment,
        }
    }

    fn read(&mut self, begin: u64, length: u64, limits: &Limits) -> u64 {
        let slot_begin = self.bytes_before(begin, limits);
        match self.reads.last_mut() {
            Some(last) if last.reaches(begin, limits) => {
                last.length = last.length.max(begin - last.offset + length);
            }
            _ => self.reads.push(OpenRead { offset: begin, slot_begin, length }),
        }
        self.bytes = self.bytes.max((slot_begin + length).next_multiple_of(limits.alignment));
        slot_begin
    }
}

impl OpenRead {
    /// Whether a read at `begin` should be part of this one.
    fn reaches(&self, begin: u64, limits: &Limits) -> bool {
        begin >= self.offset && begin <= (self.offset + self.length).saturating_add(limits.gap_bytes)
    }
}

/// How long the elements in `bytes` bytes are after a cast.
fn bytes_after(cast: Option<Cast>, bytes: u64) -> u64 {
    cast.map_or(bytes, |cast| bytes / cast.from.item_bytes() * cast.to.item_bytes())
}

/// Sizes inside a chunk fit, since a chunk is at most `chunk_bytes`, which came from a `usize`.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
