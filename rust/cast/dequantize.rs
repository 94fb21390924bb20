//! Dequantization on the CPU, distributed evenly over threads.
//!
//! Equal codes of a block give equal numbers, so a block of many 8-bit codes is one table of 256 numbers, and 4-bit codes
//! have a table of 16 numbers for each scale. Targets whose rows are not contiguous are written through tiles.

use super::decoder::{Decoder, Number, Numbers, TILE_ROWS};
use super::matrix::Matrix;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::compute_pool;
use crate::os::retry::SharedCheck;
use std::{ptr, slice};

/// Numbers that a thread computes at a time.
const PART_NUMBERS: u64 = 512 << 10;
/// Fewest numbers worth distributing: fewer are done before other threads have woken up.
const SHARED_NUMBERS_MIN: u64 = 512 << 10;
/// Largest block whose rows are not split between parts, since each part computes the block's table.
const WHOLE_BLOCK_ROWS_MAX: u64 = 512;
/// Columns of a tile.
const TILE_COLUMNS: usize = 128;

/// Dequantizes all matrices on up to `threads` threads, and calls `check` before each part.
///
/// # Safety
/// Codes and scales must be readable memory of this process, with a scale for each block. Targets must be writable, must
/// not overlap anything else, and must not be used by other code until this returns.
///
/// # Errors
/// `internal` for a target that is not a float of 16 bits or more. Nothing has been written then. Errors of `check`, after
/// which a part of the numbers has been written.
pub unsafe fn run(matrices: &[Matrix], threads: usize, check: SharedCheck<'_>) -> Result<()> {
    if let Some(wrong) = matrices.iter().find(|matrix| !matrix.to.is_castable()) {
        return Err(Error::new(Kind::Internal, format!("no numbers of {}", wrong.to)));
    }
    // SAFETY: the caller's guarantee; a part stays within its matrix.
    let convert = |part: &Matrix| unsafe { part.run() };
    let numbers = matrices.iter().map(|matrix| matrix.numbers()).fold(0, u64::saturating_add);
    if numbers >= SHARED_NUMBERS_MIN {
        let parts: Vec<Matrix> = matrices.iter().flat_map(Matrix::parts).collect();
        return compute_pool::try_for_each(threads, &parts, check, convert);
    }
    check()?;
    matrices.iter().for_each(convert);
    Ok(())
}

impl Matrix {
    /// Splits the matrix into parts of about [`PART_NUMBERS`], along rows of the target if it has some.
    fn parts(&self) -> impl Iterator<Item = Matrix> {
        let whole = self.size.map(|size| size.max(1));
        let [rows, columns] = whole;
        let unit = if (1..=WHOLE_BLOCK_ROWS_MAX).contains(&self.block[0]) { self.block[0] } else { 1 };
        let step = if self.has_rows() {
            let step = (PART_NUMBERS / columns).max(1).next_multiple_of(unit);
            [step.min(rows), columns.min(PART_NUMBERS)]
        } else {
            let tile = TILE_COLUMNS as u64;
            [rows.min(PART_NUMBERS), (PART_NUMBERS / rows).max(1).next_multiple_of(tile).min(columns)]
        };
        let counts = [self.size[0].div_ceil(step[0]), self.size[1].div_ceil(step[1])];
        let matrix = *self;
        (0..counts[0])
            .flat_map(move |row| (0..counts[1]).map(move |column| matrix.part([row * step[0], column * step[1]], step)))
    }

    fn part(&self, first: [u64; 2], size: [u64; 2]) -> Matrix {
        let [row, column] = first;
        Matrix {
            size: [size[0].min(self.size[0] - row), size[1].min(self.size[1] - column)],
            begin: [self.begin[0] + row, self.begin[1] + column],
            codes: self.codes
                + row * self.code_strides[0]
                + column / self.scheme.codes_per_byte() * self.code_strides[1],
            target: self.target + row * self.target_strides[0] + column * self.target_strides[1],
            ..*self
        }
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn run(&self) {
        // SAFETY: the caller's guarantee is the same.
        unsafe {
            match self.to.item_bytes() {
                2 => self.run_as::<2>(),
                4 => self.run_as::<4>(),
                _ => self.run_as::<8>(),
            }
        }
    }

    /// # Safety
    /// As for [`run`], with numbers of this size.
    unsafe fn run_as<const BYTES: usize>(&self) {
        let [rows, columns] = self.size.map(to_usize);
        // SAFETY: the caller guarantees a readable global scale.
        let mut decoder = unsafe { Decoder::<BYTES>::new(self) };
        if self.has_rows() {
            let write = |row: usize, column: usize, count: usize, numbers: Numbers<'_, BYTES>| {
                // SAFETY: the caller guarantees a writable target; its uninitialized bytes are overwritten, never read.
                numbers.write(unsafe { slice::from_raw_parts_mut(self.target_at(row, column).cast(), count) });
            };
            // SAFETY: the caller guarantees readable codes and scales.
            return unsafe { decoder.blocks(0..rows, 0..columns, write) };
        }
        let mut tile = [[[0; BYTES]; TILE_ROWS]; TILE_COLUMNS];
        for first_column in (0..columns).step_by(TILE_COLUMNS) {
            let width = TILE_COLUMNS.min(columns - first_column);
            for first_row in (0..rows).step_by(TILE_ROWS) {
                let height = TILE_ROWS.min(rows - first_row);
                let write = |row: usize, column: usize, _, numbers: Numbers<'_, BYTES>| {
                    numbers.write_to_tile(tile.get_mut(column - first_column..).unwrap_or_default(), row - first_row);
                };
                // SAFETY: the caller guarantees readable codes and scales.
                unsafe {
                    decoder.blocks(first_row..first_row + height, first_column..first_column + width, write);
                }
                for (column, line) in tile.iter().enumerate().take(width) {
                    // SAFETY: the tile is within the matrix, for which the caller guarantees a writable target.
                    unsafe { self.write_line(line, first_row, first_column + column, height) };
                }
            }
        }
    }

    /// Writes a line of a tile to a column of the target.
    ///
    /// # Safety
    /// The target is writable.
    unsafe fn write_line<const BYTES: usize>(
        &self,
        line: &[Number<BYTES>; TILE_ROWS],
        row: usize,
        column: usize,
        count: usize,
    ) {
        let target = self.target_at(row, column);
        let stride = to_usize(self.target_strides[0]);
        if stride == BYTES {
            // SAFETY: the numbers of the column are contiguous.
            unsafe { ptr::copy_nonoverlapping(line.as_ptr().cast(), target, count.min(TILE_ROWS) * BYTES) };
            return;
        }
        for (index, number) in line.iter().enumerate().take(count) {
            // SAFETY: the row is within the matrix.
            unsafe { target.add(index * stride).cast::<Number<BYTES>>().write(*number) };
        }
    }
}
