//! Task table of the device kernel: sources, destinations and dtypes of strided
//! copies, and elements to write by position. Pure: it holds addresses and touches no
//! device.
//!
//! csrc/kernels/scatter.h declares the same layout. `tests/rust/scatter.rs`
//! runs the kernel's code on tables made here.

use crate::cast::put::{POSITION_BYTES, Put};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Bytes of a tile on its wider side. A thread block processes one tile at a time.
pub const TILE_BYTES: u64 = 16 << 10;

/// Positions of a tile: a write by position takes as long as one of several bytes.
pub const TILE_POSITIONS: u64 = 4096;

/// Number of tasks that fit a [`Batch`].
pub const BATCH_TASKS: usize = 85;

/// Row of the table, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Device address of the first byte, of any alignment.
    pub source: u64,
    /// Device address of the first element, aligned to it.
    pub target: u64,
    /// Elements of a row; bytes if `from` and `to` are equal. Number of positions if there are positions.
    pub row_elements: u64,
    /// Distance between the starts of consecutive source rows, in bytes. The target's rows are packed. Device address of
    /// the positions if there are positions.
    pub source_stride_bytes: u64,
    /// Number of rows. 1 if there are positions.
    pub rows: u32,
    /// Number of tiles of all previous tasks.
    pub first_tile: u32,
    /// `c10::ScalarType` of the source.
    pub from: u8,
    /// `c10::ScalarType` of the target.
    pub to: u8,
    /// Bytes of an element to write by position, or 0 if there are no positions.
    pub put_bytes: u8,
    padding: [u8; 5],
}

/// Bytes of a [`Task`] in a table.
pub const TASK_BYTES: usize = size_of::<Task>();

/// Strided copy on the device, with a cast if `from` and `to` differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    /// Device address of the first byte, of any alignment.
    pub source: u64,
    /// Device address of the first element, aligned to it.
    pub target: u64,
    /// Elements of a row; bytes if `from` and `to` are equal, for any dtype.
    pub row_elements: u64,
    /// Number of rows. They are packed in the target.
    pub rows: u64,
    /// Distance between the starts of consecutive source rows, in bytes.
    pub source_stride_bytes: u64,
    /// Dtype of the source.
    pub from: Dtype,
    /// Dtype of the target.
    pub to: Dtype,
}

/// Task table under construction.
#[derive(Clone, Debug, Default)]
pub struct Table {
    tasks: Vec<Task>,
    tile_count: u32,
}

impl Table {
    /// Adds a copy. A copy without elements adds nothing. Fails with `internal` if the kernel has no such cast, the
    /// target is not aligned to its element, the sizes exceed 64 bits, or the number of tiles exceeds 32 bits (64 TiB).
    pub fn push(&mut self, copy: StridedCopy) -> Result<()> {
        let invalid = |why: &str| Error::new(Kind::Internal, format!("{copy:?} {why}"));
        let (from, to) = codes(copy.from, copy.to).ok_or_else(|| invalid("is not a cast of the kernel"))?;
        let (source_bytes, target_bytes) = item_bytes(copy.from, copy.to);
        if !copy.target.is_multiple_of(target_bytes) {
            return Err(invalid("has a target that is not aligned to its element"));
        }
        let StridedCopy { mut row_elements, mut rows, source_stride_bytes, .. } = copy;
        let too_large = || invalid("does not fit 64 bits");
        let elements = row_elements.checked_mul(rows).ok_or_else(too_large)?;
        if elements == 0 {
            return Ok(());
        }
        let row_bytes = row_elements.checked_mul(source_bytes).ok_or_else(too_large)?;
        let source_span = source_stride_bytes.checked_mul(rows - 1).and_then(|span| span.checked_add(row_bytes));
        let source_end = source_span.and_then(|span| copy.source.checked_add(span));
        let target_end = elements.checked_mul(target_bytes).and_then(|span| copy.target.checked_add(span));
        if source_end.is_none() || target_end.is_none() {
            return Err(too_large());
        }
        // Rows without gaps are one row. The kernel divides by the row length only if there are several rows.
        if source_stride_bytes == row_bytes {
            (row_elements, rows) = (elements, 1);
        }
        let (mut source, mut target) = (copy.source, copy.target);
        while rows > 0 {
            let step = u32::try_from(rows).unwrap_or(u32::MAX);
            let elements = row_elements * u64::from(step);
            let tiles = elements.div_ceil(TILE_BYTES / source_bytes.max(target_bytes));
            let first_tile = self.add_tiles(tiles).ok_or_else(|| invalid("has too many tiles for one table"))?;
            self.tasks.push(Task {
                source,
                target,
                row_elements,
                source_stride_bytes,
                rows: step,
                first_tile,
                from,
                to,
                ..Task::default()
            });
            rows -= u64::from(step);
            if rows > 0 {
                source += source_stride_bytes * u64::from(step);
                target += elements * target_bytes;
            }
        }
        Ok(())
    }

    /// Adds elements to write by position. Without elements, adds nothing. Positions beyond the target are not written.
    /// Fails with `internal` if the kernel writes no elements of this size, an address is not aligned to its elements, or
    /// the number of tiles exceeds 32 bits.
    pub fn push_put(&mut self, put: Put) -> Result<()> {
        let invalid = |why: &str| Error::new(Kind::Internal, format!("{put:?} {why}"));
        let Put { positions, values, target, elements, target_elements, item_bytes } = put;
        let put_bytes = u8::try_from(item_bytes).ok().filter(|_| Put::is_possible(item_bytes));
        let put_bytes = put_bytes.ok_or_else(|| invalid("has elements that the kernel does not write"))?;
        let is_aligned = [values, target].iter().all(|address| address.is_multiple_of(item_bytes));
        if !is_aligned || !positions.is_multiple_of(POSITION_BYTES) {
            return Err(invalid("has an address that is not aligned to its elements"));
        }
        if let Some(last) = target_elements.checked_sub(1).filter(|_| elements > 0) {
            let tiles = elements.div_ceil(TILE_POSITIONS);
            let first_tile = self.add_tiles(tiles).ok_or_else(|| invalid("has too many tiles for one table"))?;
            self.tasks.push(Task {
                source: values,
                target,
                row_elements: elements,
                source_stride_bytes: positions,
                rows: u32::try_from(last).unwrap_or(u32::MAX),
                first_tile,
                put_bytes,
                ..Task::default()
            });
        }
        Ok(())
    }

    /// Counts the tiles of a task, and returns the number of tiles before it, or `None` if the sum exceeds 32 bits.
    fn add_tiles(&mut self, tiles: u64) -> Option<u32> {
        let first_tile = self.tile_count;
        self.tile_count = first_tile.checked_add(u32::try_from(tiles).ok()?)?;
        Some(first_tile)
    }

    /// Returns the tasks so far. A copy of more than 2^32 - 1 rows makes several.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// Returns the number of tiles of all tasks, the kernel's second count.
    pub fn tile_count(&self) -> u32 {
        self.tile_count
    }

    /// Returns the size of the table in bytes.
    pub fn bytes(&self) -> usize {
        self.tasks.len() * TASK_BYTES
    }

    /// Writes the table to the beginning of `slot`. The caller copies it to a device address that is a multiple of 8.
    /// Fails with `internal` if `slot` is shorter than [`Table::bytes`].
    pub fn write_to(&self, slot: &mut [u8]) -> Result<()> {
        if slot.len() < self.bytes() {
            let text = format!("a table of {} bytes does not fit a slot of {}", self.bytes(), slot.len());
            return Err(Error::new(Kind::Internal, text));
        }
        for (row, task) in slot.chunks_exact_mut(TASK_BYTES).zip(&self.tasks) {
            row.copy_from_slice(&task.to_bytes());
        }
        Ok(())
    }

    /// Splits the table into batches that fit a kernel's parameters. Each counts tiles from 0.
    pub fn batches(&self) -> impl Iterator<Item = Batch> + '_ {
        let ends = (1..).map(|batch| batch * BATCH_TASKS);
        self.tasks.chunks(BATCH_TASKS).zip(ends).map(|(tasks, end)| {
            let first = tasks.first().map_or(0, |task| task.first_tile);
            let last = self.tasks.get(end).map_or(self.tile_count, |task| task.first_tile);
            let mut batch = Batch { task_count: 0, tile_count: last - first, tasks: [Task::default(); BATCH_TASKS] };
            for (row, task) in batch.tasks.iter_mut().zip(tasks) {
                *row = Task { first_tile: task.first_tile - first, ..*task };
                batch.task_count += 1;
            }
            batch
        })
    }
}

/// Task table as a kernel parameter.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct Batch {
    /// Number of valid tasks.
    pub task_count: u32,
    /// Number of tiles of all tasks.
    pub tile_count: u32,
    /// Tasks, padded with zeros.
    pub tasks: [Task; BATCH_TASKS],
}

// Every driver accepts 4096 bytes of parameters, and the kernel's declaration has these sizes.
const _: () = assert!(TASK_BYTES == 48 && size_of::<Batch>() == 4088);

impl Task {
    fn to_bytes(self) -> [u8; TASK_BYTES] {
        let mut bytes = [0; TASK_BYTES];
        let words = [self.source, self.target, self.row_elements, self.source_stride_bytes].map(u64::to_le_bytes);
        let counts = [self.rows, self.first_tile].map(u32::to_le_bytes);
        let fields =
            words.iter().flatten().chain(counts.iter().flatten()).chain([&self.from, &self.to, &self.put_bytes]);
        bytes.iter_mut().zip(fields).for_each(|(byte, field)| *byte = *field);
        bytes
    }
}

/// Returns whether the kernel supports this cast.
pub fn has_cast(from: Dtype, to: Dtype) -> bool {
    from != to && codes(from, to).is_some()
}

/// Returns the numbers of a pair of dtypes in the table, or `None` if the kernel has no such cast.
fn codes(from: Dtype, to: Dtype) -> Option<(u8, u8)> {
    if from == to {
        return Some((0, 0));
    }
    let is_source = !matches!(from, Dtype::C32 | Dtype::C64 | Dtype::C128 | Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2);
    let code = |dtype: Dtype| u8::try_from(dtype.scalar_type()?).ok();
    code(from).zip(code(to)).filter(|_| is_source && to.is_float())
}

/// Returns the bytes of a source element and of a target element.
fn item_bytes(from: Dtype, to: Dtype) -> (u64, u64) {
    if from == to { (1, 1) } else { (from.item_bytes(), to.item_bytes()) }
}
