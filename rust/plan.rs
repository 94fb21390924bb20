//! Planner: turns tensor regions and destinations into reads and copies.
//!
//! The planner is pure: no files, no threads, no clock. Tests check its guarantees
//! for any input: each byte of each destination is written exactly once, and no
//! byte outside the tensors' data is read.
//!
//! ```text
//! file   ....[ a ][b][   c, larger than a chunk        ]...[ rows of d ]
//!             `--chunk 0--' `-chunk 1-' `-chunk 2-'
//! chunk  unit of work: one or more reads into a slot, and the copies
//!        from the slot to their addresses
//! ```

mod limits;
mod ramp;
mod run;

pub use self::limits::Limits;
use self::run::{Run, overlapping, push_runs, sort, split_shared};
use crate::cast::elements::Cast;
use crate::checkpoint::region::TensorRegion;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use std::collections::HashMap;
use std::iter;
use std::ops::Range;

/// Largest gap between two reads of a local file that is read along with them, in bytes. A disk reads a gap faster than it
/// answers another request.
pub const GAP_BYTES: u64 = 16 << 10;

/// Destination of bytes `begin..end` of a tensor region, counted in its contiguous form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Index of the tensor region.
    pub tensor: usize,
    /// First byte.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
    /// Address of the first byte, on the host or on a device.
    pub address: u64,
    /// Cast of the elements, if any.
    pub cast: Option<Cast>,
}

/// Unit of work of a load: what one worker reads at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// One read directly into host memory at the destination.
    InPlace {
        /// Index of the tensor region.
        tensor: usize,
        /// Index of the file.
        source: usize,
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        length: usize,
        /// Address of the destination.
        address: u64,
    },
    /// Reads into a slot, followed by copies from the slot to the destinations.
    Staged {
        /// Index of the file.
        source: usize,
        /// Bytes of the slot that the reads may fill after widening to the alignment.
        bytes: usize,
        /// Reads, in the order of the file and of the slot.
        reads: Vec<Read>,
        /// Copies from the slot to the destinations.
        copies: Vec<SlotCopy>,
    },
}

impl Chunk {
    /// Returns the index of the file.
    pub fn source(&self) -> usize {
        match self {
            Chunk::InPlace { source, .. } | Chunk::Staged { source, .. } => *source,
        }
    }

    /// Returns the tensor region of each copy, in the order of the file.
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
    /// First byte in the file.
    pub offset: u64,
    /// First byte in the slot.
    pub slot_begin: usize,
    /// Length in bytes.
    pub length: usize,
}

impl Read {
    /// Returns the part of this read that covers `range` of the file, or `None` if the read does not cover it.
    pub fn part(&self, range: Range<u64>) -> Option<Read> {
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let before = usize::try_from(range.start.checked_sub(self.offset)?).ok()?;
        let fits = before.checked_add(length)? <= self.length;
        fits.then(|| Read { offset: range.start, slot_begin: self.slot_begin + before, length })
    }
}

/// Bytes of a file that go to one place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: usize,
    /// Address of the first byte in memory.
    pub address: u64,
}

/// Bytes that one read brings to a slot and one copy takes from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPart {
    /// First byte in the slot.
    pub slot_begin: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: usize,
    /// Number of bytes that the copy takes before these.
    pub done: usize,
}

/// Returns the pieces of a staged chunk in the order of the file. Returns `None` if its bytes must pass through the slot:
/// if they are cast, have several destinations, or consist of rows of fewer than `row_bytes_min` bytes.
pub fn pieces(reads: &[Read], copies: &[SlotCopy], row_bytes_min: usize) -> Option<Vec<Piece>> {
    let mut pieces = Vec::with_capacity(copies.len());
    for copy in copies {
        if copy.cast.is_some() || copy.rows > 1 && copy.row_bytes < row_bytes_min {
            return None;
        }
        for part in copy.parts(reads) {
            let SlotPart { offset, length, done, .. } = part?;
            pieces.push(Piece { offset, length, address: copy.address + to_u64(done) });
        }
    }
    pieces.sort();
    let is_apart = |pair: &[Piece]| match pair {
        [one, two] => one.offset + to_u64(one.length) <= two.offset,
        _ => true,
    };
    pieces.windows(2).all(is_apart).then_some(pieces)
}

/// Copy of equally spaced rows in a slot to contiguous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// Index of the tensor region.
    pub tensor: usize,
    /// First byte in the slot.
    pub slot_begin: usize,
    /// Length of a row, in bytes.
    pub row_bytes: usize,
    /// Number of rows.
    pub rows: usize,
    /// Distance between the starts of consecutive rows in the slot, in bytes.
    pub slot_stride: usize,
    /// Address of the first row's destination.
    pub address: u64,
    /// Cast of the elements, if any.
    pub cast: Option<Cast>,
}

impl SlotCopy {
    /// Returns the number of bytes copied out of the slot.
    pub fn bytes(&self) -> usize {
        self.row_bytes.saturating_mul(self.rows)
    }

    /// Iterates over the parts of the rows, in order. Bytes that follow each other in the slot may be of several reads. The
    /// last item is `None` if no read brings the next byte.
    pub fn parts<'a>(&'a self, reads: &'a [Read]) -> impl Iterator<Item = Option<SlotPart>> + 'a {
        let mut done = 0;
        iter::from_fn(move || {
            let left_bytes = self.bytes().checked_sub(done).filter(|left| *left > 0)?;
            let (row, column) = (done.checked_div(self.row_bytes)?, done.checked_rem(self.row_bytes)?);
            let slot_begin = self.slot_begin + row * self.slot_stride + column;
            let read = reads.partition_point(|read| read.slot_begin <= slot_begin).checked_sub(1);
            let part = read.and_then(|read| reads.get(read)).and_then(|read| {
                let before = slot_begin - read.slot_begin;
                let length = read.length.checked_sub(before).filter(|length| *length > 0)?;
                let length = length.min(self.row_bytes - column);
                Some(SlotPart { slot_begin, offset: read.offset + to_u64(before), length, done })
            });
            done += part.map_or(left_bytes, |part| part.length);
            Some(part)
        })
    }

    /// Appends a row that follows at the destination, if the rows stay equally spaced in the slot. Returns whether it
    /// did.
    fn grow(&mut self, row: &SlotCopy) -> bool {
        let target = to_u64(self.target_row_bytes().saturating_mul(self.rows));
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

    /// Returns the length of a row at the destination, in bytes.
    pub fn target_row_bytes(&self) -> usize {
        to_usize(bytes_after(self.cast, to_u64(self.row_bytes)))
    }
}

/// Plans the reads and copies that fill `destinations` with the bytes of `regions`. Fails with `internal` for a
/// destination outside its tensor region, or a cast that splits an element: a bug of the caller.
pub fn plan(regions: &[TensorRegion], destinations: &[Destination], limits: &Limits) -> Result<Vec<Chunk>> {
    let mut runs = Vec::with_capacity(destinations.len());
    for destination in destinations {
        let outside = || Error::new(Kind::Internal, format!("{destination:?} is outside its tensor region"));
        let region = regions.get(destination.tensor).ok_or_else(outside)?;
        if destination.begin > destination.end || destination.end > region.bytes() {
            return Err(outside());
        }
        let item_bytes = region.dtype.item_bytes();
        let is_split = |edge: u64| !edge.is_multiple_of(item_bytes);
        if destination.cast.is_some() && (is_split(destination.begin) || is_split(destination.end)) {
            return Err(Error::new(Kind::Internal, format!("{destination:?} is cast, but splits an element")));
        }
        push_runs(region, destination, limits, &mut runs);
    }
    sort(&mut runs);
    split_shared(&mut runs, limits);
    let mut planner = Planner { limits, chunks: Vec::new(), open: None };
    for group in overlapping(&runs) {
        let shared_end = group.iter().map(Run::end).max().filter(|_| group.len() > 1);
        group.iter().for_each(|run| planner.add(*run, shared_end));
    }
    planner.close();
    let mut chunks = planner.chunks;
    if let Some(first_bytes) = limits.first_bytes {
        ramp::divide_first(&mut chunks, first_bytes, limits);
    }
    Ok(chunks)
}

struct Planner<'a> {
    limits: &'a Limits,
    chunks: Vec<Chunk>,
    open: Option<OpenChunk>,
}

/// Staged chunk that may still grow.
#[derive(Default)]
struct OpenChunk {
    source: usize,
    bytes: u64,
    reads: Vec<OpenRead>,
    copies: Vec<SlotCopy>,
    /// For each tensor region whose rows are copied one by one, the index of its last copy.
    growing: HashMap<usize, usize>,
}

struct OpenRead {
    offset: u64,
    slot_begin: u64,
    length: u64,
}

impl Planner<'_> {
    /// Adds a run. If other runs need some of its bytes, one chunk reads them once for all. The bytes of these runs end at
    /// `shared_end`.
    fn add(&mut self, run: Run, shared_end: Option<u64>) {
        let is_large = self.limits.in_place_bytes.is_some_and(|least| run.row_bytes >= least);
        if is_large && shared_end.is_none() && run.cast.is_none() {
            self.add_in_place(run);
        } else if run.rows == 1 || run.is_far_apart(self.limits) {
            let shared_bytes = shared_end.map(|end| end - run.begin);
            if let Some(bytes) = shared_bytes.filter(|bytes| *bytes <= self.limits.row_bytes_max()) {
                self.make_room(run.source, run.begin, bytes);
            }
            self.add_rows_one_by_one(run);
        } else {
            if shared_end.is_some() {
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

    /// Starts a new chunk unless the open one has room for a whole cell. Runs with other columns of the same rows come
    /// next, and then find all rows in one chunk.
    fn make_room_for_cell(&mut self, run: &Run) {
        let Some(cell) = self.limits.cell_bytes(run.stride) else { return };
        self.make_room(run.source, run.begin, cell - run.begin % cell + run.stride);
    }

    /// Starts a new chunk unless the open one has room for `needed` bytes from `begin` on.
    fn make_room(&mut self, source: usize, begin: u64, needed: u64) {
        let has_room = self.open.as_ref().is_some_and(|open| {
            open.source == source && open.bytes_before(begin, self.limits) + needed <= self.limits.chunk_bytes
        });
        if !has_room {
            self.close();
        }
    }

    /// Adds near rows: one read covers them and the gaps between.
    fn add_rows_with_gaps(&mut self, run: Run) {
        let mut row = 0;
        while row < run.rows {
            let begin = run.begin + row * run.stride;
            let room = self.room_at(run.source, begin, run.row_bytes);
            let rows = ((room - run.row_bytes) / run.stride + 1).min(run.rows - row);
            let slot_begin = self.read(run.source, begin, (rows - 1) * run.stride + run.row_bytes);
            self.copy_rows(&run, slot_begin, row, rows, run.stride);
            row += rows;
        }
    }

    /// Adds rows with one read each, unless a row extends the previous read. One copy serves rows that are equally
    /// spaced in the slot.
    fn add_rows_one_by_one(&mut self, run: Run) {
        for row in 0..run.rows {
            let slot_begin = self.read(run.source, run.begin + row * run.stride, run.row_bytes);
            if run.row_bytes == run.stride {
                self.copy_rows(&run, slot_begin, row, 1, run.row_bytes);
            } else {
                self.copy_row(&run, slot_begin, row);
            }
        }
    }

    /// Returns how many bytes from `begin` on fit the open chunk, or a new chunk if the open one has no room for
    /// `least`.
    fn room_at(&self, source: usize, begin: u64, least: u64) -> u64 {
        let room = match &self.open {
            Some(open) if open.source == source && !open.is_full(self.limits) => {
                self.limits.chunk_bytes.saturating_sub(open.bytes_before(begin, self.limits))
            }
            _ => 0,
        };
        if room < least { self.limits.chunk_bytes - begin % self.limits.alignment } else { room }
    }

    /// Adds this range to the reads of the open chunk, or of a new one, and returns its offset in the slot.
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

    /// Adds a copy of `rows` rows of the run, starting at `row`, from the slot of the open chunk.
    fn copy_rows(&mut self, run: &Run, slot_begin: u64, row: u64, rows: u64, slot_stride: u64) {
        let Some(open) = &mut self.open else { return };
        open.copies.push(run.slot_copy(slot_begin, row, rows, slot_stride));
    }

    /// Adds a copy of one row of the run, merged with the previous copy if possible.
    fn copy_row(&mut self, run: &Run, slot_begin: u64, row: u64) {
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

    /// Returns the slot offset that a read of the file at `begin` would get.
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
    /// Returns whether a read at `begin` should extend this one.
    fn reaches(&self, begin: u64, limits: &Limits) -> bool {
        begin >= self.offset && begin <= (self.offset + self.length).saturating_add(limits.gap_bytes)
    }
}

/// Returns the size of the elements in `bytes` bytes after a cast.
fn bytes_after(cast: Option<Cast>, bytes: u64) -> u64 {
    cast.map_or(bytes, |cast| bytes / cast.from.item_bytes() * cast.to.item_bytes())
}
