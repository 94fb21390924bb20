//! Numbers of codes, from tables where a block has many equal codes.

use super::cut::Cut;
use super::elements::Cast;
use super::matrix::Matrix;
use super::scheme::E2M1_VALUES;
use crate::dtype::Dtype;
use crate::num::to_usize;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;
use std::{ptr, slice};
use zerocopy::IntoBytes;

/// Fewest codes of a block for which a table of 256 numbers is faster than the product of each.
const TABLE_CODES_MIN: usize = 512;
/// Fewest codes for which the numbers of all 256 scales are computed before.
const ALL_SCALES_CODES_MIN: u64 = 8 << 10;
/// Rows of a tile. A line of a tile is contiguous in a transposed target.
pub(super) const TILE_ROWS: usize = 64;
/// Codes of a row that are gathered, or multiplied, at a time.
const RUN_CODES: usize = 512;
/// Rows whose codes are requested before they are needed, for tiles.
const ROWS_AHEAD: usize = 16;
/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// Number in the target dtype.
pub(super) type Number<const BYTES: usize> = [u8; BYTES];

/// Codes of a part of a row with the table of their numbers, or the numbers themselves.
pub(super) enum Numbers<'a, const BYTES: usize> {
    /// One code in a byte.
    Bytes(&'a [u8], &'a [Number<BYTES>; 256]),
    /// Two codes in a byte, the low half first.
    Halves(&'a [u8], &'a [Number<BYTES>; 16]),
    Values(&'a [Number<BYTES>]),
}

impl<const BYTES: usize> Numbers<'_, BYTES> {
    pub(super) fn write(&self, target: &mut [Number<BYTES>]) {
        match self {
            Numbers::Bytes(codes, table) => {
                for_groups(target, codes, |number, code| *number = number_of(table, code));
            }
            Numbers::Halves(bytes, table) => {
                for_groups(target.as_chunks_mut().0, bytes, |[low, high]: &mut [Number<BYTES>; 2], byte| {
                    *low = half_of(table, byte & 15);
                    *high = half_of(table, byte >> 4);
                });
            }
            Numbers::Values(values) => {
                target.iter_mut().zip(*values).for_each(|(number, value)| *number = *value);
            }
        }
    }

    /// Writes the numbers to a row of a tile, from its first line on.
    #[allow(clippy::indexing_slicing, reason = "the row is in the tile")]
    pub(super) fn write_to_tile(&self, lines: &mut [[Number<BYTES>; TILE_ROWS]], row: usize) {
        let row = row % TILE_ROWS;
        match self {
            Numbers::Bytes(codes, table) => {
                for_groups(lines, codes, |line, code| line[row] = number_of(table, code));
            }
            Numbers::Halves(bytes, table) => {
                for_groups(lines.as_chunks_mut().0, bytes, |[low, high]: &mut [_; 2], byte| {
                    low[row] = half_of(table, byte & 15);
                    high[row] = half_of(table, byte >> 4);
                });
            }
            Numbers::Values(values) => lines.iter_mut().zip(*values).for_each(|(line, value)| line[row] = *value),
        }
    }
}

#[inline(always)]
#[allow(clippy::indexing_slicing, reason = "the table has an entry for every byte")]
fn number_of<const BYTES: usize>(table: &[Number<BYTES>; 256], code: u8) -> Number<BYTES> {
    table[usize::from(code)]
}

#[inline(always)]
#[allow(clippy::indexing_slicing, reason = "the table has an entry for every half of a byte")]
fn half_of<const BYTES: usize>(table: &[Number<BYTES>; 16], code: u8) -> Number<BYTES> {
    table[usize::from(code & 15)]
}

/// Applies `write` to all targets with their codes, in groups that the compiler unrolls.
#[inline(always)]
fn for_groups<T>(targets: &mut [T], codes: &[u8], write: impl Fn(&mut T, u8)) {
    const GROUP: usize = 16;
    let targets = targets.get_mut(..codes.len()).unwrap_or_default();
    let (target_groups, target_rest) = targets.as_chunks_mut::<GROUP>();
    let (code_groups, code_rest) = codes.as_chunks::<GROUP>();
    for (targets, codes) in target_groups.iter_mut().zip(code_groups) {
        targets.iter_mut().zip(codes).for_each(|(target, code)| write(target, *code));
    }
    target_rest.iter_mut().zip(code_rest).for_each(|(target, code)| write(target, *code));
}

/// Tables of a matrix, and memory for those of a block.
pub(super) struct Decoder<'a, const BYTES: usize> {
    matrix: &'a Matrix,
    global_scale: f32,
    /// Values of 8-bit codes.
    values: [f32; 256],
    /// Numbers of the 4-bit codes for each scale of 8 bits. Empty if there are few codes.
    all_scales: Vec<[Number<BYTES>; 16]>,
    table: [Number<BYTES>; 256],
    small_table: [Number<BYTES>; 16],
    /// Codes that are not contiguous in memory.
    gathered: [u8; RUN_CODES],
    products: [f32; RUN_CODES],
    numbers: [Number<BYTES>; RUN_CODES],
}

impl<'a, const BYTES: usize> Decoder<'a, BYTES> {
    /// # Safety
    /// The global scale is readable.
    pub(super) unsafe fn new(matrix: &'a Matrix) -> Self {
        let mut decoder = Decoder {
            matrix,
            global_scale: matrix.global_scale.map_or(1.0, |address| {
                // SAFETY: the caller guarantees a readable f32.
                unsafe { ptr::with_exposed_provenance::<f32>(to_usize(address)).read_unaligned() }
            }),
            values: [0.0; 256],
            all_scales: Vec::new(),
            table: [[0; BYTES]; 256],
            small_table: [[0; BYTES]; 16],
            gathered: [0; RUN_CODES],
            products: [0.0; RUN_CODES],
            numbers: [[0; BYTES]; RUN_CODES],
        };
        if matrix.scheme.codes_per_byte() == 1 {
            let codes: [u8; 256] = std::array::from_fn(|code| code.to_le_bytes()[0]);
            if let Some(cast) = Cast::new(matrix.from, Dtype::F32) {
                cast.run(&codes, decoder.values.as_mut_bytes());
            }
        } else if matrix.scale_dtype.item_bytes() == 1 && matrix.numbers() >= ALL_SCALES_CODES_MIN {
            decoder.all_scales.resize(256, [[0; BYTES]; 16]);
            for (table, scale) in decoder.all_scales.iter_mut().zip(0..) {
                let factors = matrix.scheme.factors(matrix.scale_dtype, scale, decoder.global_scale);
                round_products(&E2M1_VALUES, factors, &mut [0.0; 16], table, matrix.to);
            }
        }
        decoder
    }

    /// Passes the numbers of all rows and columns in these ranges to `write`, in pieces: their row, column and number.
    ///
    /// # Safety
    /// The codes and their scales are readable.
    pub(super) unsafe fn blocks(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        mut write: impl FnMut(usize, usize, usize, Numbers<'_, BYTES>),
    ) {
        let [row_begin, column_begin] = self.matrix.begin.map(to_usize);
        let [block_rows, block_columns] = self.matrix.block.map(to_usize);
        let columns = Cut::new(columns, column_begin, block_columns);
        for (block_row, rows) in Cut::new(rows, row_begin, block_rows) {
            for (block_column, columns) in columns.clone() {
                // SAFETY: the caller guarantees a scale for each block.
                let scale = unsafe { self.scale(block_row, block_column) };
                // SAFETY: the caller guarantees readable codes.
                unsafe { self.block(scale, rows.clone(), columns, &mut write) };
            }
        }
    }

    /// Returns the bits of the scale of a block.
    ///
    /// # Safety
    /// The block has a scale.
    unsafe fn scale(&self, row: usize, column: usize) -> u32 {
        let [row_stride, column_stride] = self.matrix.scale_strides.map(to_usize);
        let scales = ptr::with_exposed_provenance::<u8>(to_usize(self.matrix.scales));
        let scale = scales.wrapping_add(row * row_stride + column * column_stride);
        // SAFETY: the caller guarantees a readable scale of this size.
        unsafe {
            match self.matrix.scale_dtype.item_bytes() {
                1 => u32::from(scale.read()),
                2 => u32::from(scale.cast::<u16>().read_unaligned()),
                _ => scale.cast::<u32>().read_unaligned(),
            }
        }
    }

    /// Passes the numbers of one block to `write`.
    ///
    /// # Safety
    /// The codes are readable.
    unsafe fn block(
        &mut self,
        scale: u32,
        rows: Range<usize>,
        columns: Range<usize>,
        write: &mut impl FnMut(usize, usize, usize, Numbers<'_, BYTES>),
    ) {
        let matrix = self.matrix;
        let per_byte = to_usize(matrix.scheme.codes_per_byte());
        let has_table = per_byte == 1 && rows.len() * columns.len() >= TABLE_CODES_MIN;
        let factors = || matrix.scheme.factors(matrix.scale_dtype, scale, self.global_scale);
        let mut all = None;
        let mut product_factors = [1.0; 2];
        if per_byte == 2 {
            all = self.all_scales.get(scale.to_le_bytes().map(usize::from)[0]);
            if all.is_none() {
                let factors = factors();
                round_products(&E2M1_VALUES, factors, &mut [0.0; 16], &mut self.small_table, matrix.to);
            }
        } else {
            product_factors = factors();
            if has_table {
                let products = self.products.as_mut_slice();
                round_products(&self.values, product_factors, products, &mut self.table, matrix.to);
            }
        }
        let is_packed = matrix.code_strides[1] == 1;
        // Contiguous codes that need no memory for their numbers are one piece.
        let step = if is_packed && (per_byte == 2 || has_table) { columns.len().max(1) } else { RUN_CODES };
        // Processors load rows of a block late, because they are far from each other.
        let ahead = if matrix.has_rows() { columns.len() / per_byte } else { matrix.row_bytes() * ROWS_AHEAD };
        for row in rows {
            for first in columns.clone().step_by(step) {
                let count = step.min(columns.end - first);
                if is_packed {
                    prefetch(matrix.code_at(row, first / per_byte).wrapping_add(ahead), count / per_byte);
                }
                // SAFETY: the codes are in the matrix, for which the caller guarantees readable memory.
                let codes = unsafe { codes_at(matrix, row, first / per_byte, count / per_byte, &mut self.gathered) };
                let numbers = if per_byte == 2 {
                    Numbers::Halves(codes, all.unwrap_or(&self.small_table))
                } else if has_table {
                    Numbers::Bytes(codes, &self.table)
                } else {
                    let [factor, second] = product_factors;
                    for (product, code) in self.products.iter_mut().zip(codes) {
                        let value = self.values.get(usize::from(*code)).copied().unwrap_or_default();
                        *product = value * factor * second;
                    }
                    let products = self.products.get(..count).unwrap_or_default();
                    let numbers = self.numbers.get_mut(..count).unwrap_or_default();
                    round(products, numbers, matrix.to);
                    Numbers::Values(numbers)
                };
                write(row, first, count, numbers);
            }
        }
    }
}

/// Requests cache lines, which need not be in memory of the process.
#[inline(always)]
fn prefetch(first: *const u8, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(LINE_BYTES) {
        // SAFETY: every x86-64 processor has the instruction, which accepts any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, count);
}

/// Returns `count` stored bytes of a row, in place or gathered.
///
/// # Safety
/// The bytes are readable.
unsafe fn codes_at<'a>(
    matrix: &Matrix,
    row: usize,
    byte: usize,
    count: usize,
    gathered: &'a mut [u8; RUN_CODES],
) -> &'a [u8] {
    let stride = to_usize(matrix.code_strides[1]);
    let first = matrix.code_at(row, byte);
    if stride == 1 {
        // SAFETY: the caller guarantees readable memory, which nothing changes meanwhile.
        return unsafe { slice::from_raw_parts(first, count) };
    }
    let gathered = gathered.get_mut(..count).unwrap_or_default();
    for (index, code) in gathered.iter_mut().enumerate() {
        // SAFETY: as above.
        *code = unsafe { first.wrapping_add(index * stride).read() };
    }
    gathered
}

/// Computes and rounds the numbers of codes with these values.
fn round_products<const BYTES: usize>(
    values: &[f32],
    [factor, second]: [f32; 2],
    products: &mut [f32],
    numbers: &mut [Number<BYTES>],
    to: Dtype,
) {
    let products = products.get_mut(..values.len()).unwrap_or_default();
    for (product, value) in products.iter_mut().zip(values) {
        *product = value * factor * second;
    }
    round(products, numbers, to);
}

/// Rounds to a dtype with the rules of casts.
fn round<const BYTES: usize>(values: &[f32], numbers: &mut [Number<BYTES>], to: Dtype) {
    let target = numbers.as_flattened_mut();
    match Cast::new(Dtype::F32, to) {
        Some(cast) => cast.run(values.as_bytes(), target),
        None => target.copy_from_slice(values.as_bytes()),
    }
}
