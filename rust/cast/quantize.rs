//! Quantization on the CPU, distributed over threads.
//!
//! A scale is the largest magnitude of its block divided by the largest code, and a code is the quotient of number and
//! scale, rounded to nearest with ties to even. All of it is f32 arithmetic, as in compressed-tensors.

use super::cut::Cut;
use super::elements::Cast;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, named_enum};
use crate::num::{to_u64, to_usize};
use crate::os::compute_pool;
use crate::os::retry::SharedCheck;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{ptr, slice};
use zerocopy::IntoBytes;

named_enum! {
    /// Kind of codes.
    Codes,
    /// Returns the name, as operators and rules have it.
    name:
    /// Floats of 8 bits with 3 of mantissa.
    F8E4M3 = "f8e4m3",
    /// Floats of 8 bits with 2 of mantissa.
    F8E5M2 = "f8e5m2",
    /// Integers of 8 bits.
    I8 = "i8",
}

impl Codes {
    /// Returns the kind with this name. Fails with `invalid-argument` for any other name.
    pub fn parse(name: &str) -> Result<Codes> {
        Codes::ALL.iter().copied().find(|codes| codes.name() == name).ok_or_else(|| {
            let known: Vec<_> = Codes::ALL.iter().map(|codes| codes.name()).collect();
            let text = format!("the scheme {name:?} is not known; the schemes are {}", known.join(", "));
            Error::new(Kind::InvalidArgument, text)
        })
    }

    /// Returns the dtype of the codes.
    pub fn dtype(self) -> Dtype {
        match self {
            Codes::F8E4M3 => Dtype::F8E4M3,
            Codes::F8E5M2 => Dtype::F8E5M2,
            Codes::I8 => Dtype::I8,
        }
    }

    /// Returns the divisor of the largest magnitude. That of integers is half of their range.
    fn divisor(self) -> f32 {
        match self {
            Codes::F8E4M3 => 448.0,
            Codes::F8E5M2 => 57344.0,
            Codes::I8 => 127.5,
        }
    }

    /// Returns the smallest and the largest code.
    fn limits(self) -> [f32; 2] {
        match self {
            Codes::F8E4M3 | Codes::F8E5M2 => [-self.divisor(), self.divisor()],
            Codes::I8 => [-128.0, 127.0],
        }
    }
}

/// Returns rows and columns of a block: one scale for each row if none is given, and 0 for all.
pub fn block(given: &[i64]) -> Result<[u64; 2]> {
    let invalid = || {
        let text = format!("block is {given:?}, but must be rows and columns of at least 1, or 0 for all");
        Error::new(Kind::InvalidArgument, text)
    };
    match given {
        [] => Ok([1, 0]),
        [rows, columns] => {
            u64::try_from(*rows).ok().zip(u64::try_from(*columns).ok()).map(<[u64; 2]>::from).ok_or_else(invalid)
        }
        _ => Err(invalid()),
    }
}

/// Returns the number of blocks in each direction.
pub fn grid(size: [u64; 2], block: [u64; 2]) -> [u64; 2] {
    let count = |size: u64, block: u64| if block == 0 { 1 } else { size.div_ceil(block) };
    [count(size[0], block[0]), count(size[1], block[1])]
}

/// Matrix of numbers, and the memory of its codes and scales.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Kind of the codes.
    pub to: Codes,
    /// Dtype of the numbers.
    pub from: Dtype,
    /// Number of rows and of columns.
    pub size: [u64; 2],
    /// Row of the matrix to which the first row belongs.
    pub first_row: u64,
    /// Rows and columns of a block, or 0 for all.
    pub block: [u64; 2],
    /// Address of the first number.
    pub values: u64,
    /// Strides of rows and columns, in bytes.
    pub strides: [u64; 2],
    /// Address of the codes, which are contiguous.
    pub codes: u64,
    /// Address of the f32 scales, which are contiguous and aligned.
    pub scales: u64,
}

/// Numbers that a thread converts at a time.
const PART_NUMBERS: u64 = 256 << 10;
/// Numbers of a row that are converted to f32 at a time.
const RUN_NUMBERS: usize = 512;
/// Scale of a block of zeros.
const SCALE_OF_ZEROS: f32 = f32::EPSILON;

/// Quantizes all matrices on up to `threads` threads, and calls `check` before each part.
///
/// # Safety
/// The numbers are readable memory of this process. Codes and scales are writable, and no other code uses them until
/// this returns. All scales are 0.
///
/// # Errors
/// Errors of `check`, after which parts of codes and scales have been written.
pub unsafe fn run(matrices: &[Numbers], threads: usize, check: SharedCheck<'_>) -> Result<()> {
    let parts: Vec<Numbers> = matrices.iter().flat_map(Numbers::parts).collect();
    // SAFETY: the caller's guarantees; the parts of a matrix have different rows of codes, and share scales as atomics.
    compute_pool::try_for_each(threads, &parts, check, |part| unsafe { part.measure() })?;
    for matrix in matrices {
        // SAFETY: the caller's guarantee.
        unsafe { matrix.finish_scales() };
    }
    // SAFETY: as above.
    compute_pool::try_for_each(threads, &parts, check, |part| unsafe { part.encode() })
}

impl Numbers {
    fn parts(&self) -> impl Iterator<Item = Numbers> {
        let [rows, columns] = self.size;
        let step = (PART_NUMBERS / columns.max(1)).max(1);
        let matrix = *self;
        (0..if columns == 0 { 0 } else { rows.div_ceil(step) }).map(move |part| Numbers {
            size: [step.min(rows - part * step), columns],
            first_row: part * step,
            values: matrix.values + part * step * matrix.strides[0],
            codes: matrix.codes + part * step * columns,
            ..matrix
        })
    }

    fn columns(&self) -> usize {
        to_usize(self.size[1])
    }

    /// Returns the scale of a block.
    ///
    /// # Safety
    /// The block exists, and its scale is memory that only this module uses.
    unsafe fn scale(&self, row: usize, column: usize) -> &AtomicU32 {
        let count = grid([1, self.size[1]], self.block)[1];
        let scales = ptr::with_exposed_provenance_mut::<u32>(to_usize(self.scales));
        // SAFETY: the caller guarantees aligned memory.
        unsafe { AtomicU32::from_ptr(scales.wrapping_add(row * to_usize(count) + column)) }
    }

    /// Passes all numbers as f32 to `visit`, with row, column and block, in pieces of one block.
    ///
    /// # Safety
    /// The numbers are readable.
    unsafe fn visit(&self, mut visit: impl FnMut(usize, usize, [usize; 2], &mut [f32])) {
        let mut values = [0.0; RUN_NUMBERS];
        let [block_rows, block_columns] = self.block.map(to_usize);
        let rows = Cut::new(0..to_usize(self.size[0]), to_usize(self.first_row), block_rows);
        let columns = Cut::new(0..self.columns(), 0, block_columns);
        for (block_row, rows) in rows {
            for row in rows {
                for (block_column, columns) in columns.clone() {
                    for first in columns.clone().step_by(RUN_NUMBERS) {
                        let count = RUN_NUMBERS.min(columns.end - first);
                        let values = values.get_mut(..count).unwrap_or_default();
                        // SAFETY: the caller guarantees readable numbers.
                        unsafe { self.read(row, first..first + count, values) };
                        visit(row, first, [block_row, block_column], values);
                    }
                }
            }
        }
    }

    /// # Safety
    /// The numbers are readable.
    unsafe fn read(&self, row: usize, columns: Range<usize>, values: &mut [f32]) {
        let item_bytes = to_usize(self.from.item_bytes());
        let [row_stride, stride] = self.strides.map(to_usize);
        let first = ptr::with_exposed_provenance::<u8>(to_usize(self.values));
        let first = first.wrapping_add(row * row_stride + columns.start * stride);
        let mut gathered = [0; RUN_NUMBERS * size_of::<f64>()];
        let bytes = if stride == item_bytes {
            // SAFETY: the caller guarantees readable numbers, which are contiguous.
            unsafe { slice::from_raw_parts(first, columns.len() * item_bytes) }
        } else {
            let gathered = gathered.get_mut(..columns.len() * item_bytes).unwrap_or_default();
            for (index, number) in gathered.chunks_exact_mut(item_bytes).enumerate() {
                // SAFETY: as above, for each of them.
                let bytes = unsafe { slice::from_raw_parts(first.wrapping_add(index * stride), item_bytes) };
                number.copy_from_slice(bytes);
            }
            gathered
        };
        match Cast::new(self.from, Dtype::F32) {
            Some(cast) => cast.run(bytes, values.as_mut_bytes()),
            None => values.as_mut_bytes().copy_from_slice(bytes),
        }
    }

    /// Sets each scale to the bits of the largest magnitude. Those of NaN are the largest of all.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn measure(&self) {
        let measure = |_, _, [row, column]: [usize; 2], values: &mut [f32]| {
            let largest = values.iter().map(|value| value.abs().to_bits()).fold(0, u32::max);
            // SAFETY: the caller guarantees memory for the scales.
            unsafe { self.scale(row, column) }.fetch_max(largest, Ordering::Relaxed);
        };
        // SAFETY: the caller guarantees readable numbers.
        unsafe { self.visit(measure) };
    }

    /// Divides the largest magnitudes by the largest code.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn finish_scales(&self) {
        let [rows, columns] = grid(self.size, self.block).map(to_usize);
        for index in 0..rows * columns {
            // SAFETY: the caller guarantees memory for the scales.
            let scale = unsafe { self.scale(index / columns, index % columns) };
            let quotient = f32::from_bits(scale.load(Ordering::Relaxed)) / self.to.divisor();
            let quotient = if quotient == 0.0 { SCALE_OF_ZEROS } else { quotient };
            scale.store(quotient.to_bits(), Ordering::Relaxed);
        }
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn encode(&self) {
        let [least, most] = self.to.limits();
        let cast = Cast::new(Dtype::F32, self.to.dtype());
        let encode = |row: usize, column: usize, block: [usize; 2], values: &mut [f32]| {
            // SAFETY: the caller guarantees memory for the scales.
            let scale = f32::from_bits(unsafe { self.scale(block[0], block[1]) }.load(Ordering::Relaxed));
            for value in &mut *values {
                *value = (*value / scale).clamp(least, most);
            }
            let codes = ptr::with_exposed_provenance_mut::<u8>(to_usize(self.codes));
            let codes = codes.wrapping_add(row * self.columns() + column);
            // SAFETY: the caller guarantees writable codes, which are overwritten and not read.
            let codes = unsafe { slice::from_raw_parts_mut(codes, values.len()) };
            match cast {
                Some(cast) => cast.run(values.as_bytes(), codes),
                None => codes.iter_mut().zip(values).for_each(|(code, value)| *code = round_to_i8(*value)),
            }
        };
        // SAFETY: the caller guarantees readable numbers.
        unsafe { self.visit(encode) };
    }
}

/// Rounds a number from -128 to 127, to nearest with ties to even. NaN becomes 0.
fn round_to_i8(value: f32) -> u8 {
    // One unit in the last place of this number is 1, so that the addition rounds.
    const UNIT: f32 = 12_582_912.0;
    let value = if value.is_nan() { 0.0 } else { value };
    let [code, ..] = (value + UNIT).to_bits().to_le_bytes();
    code
}

/// Returns the numbers of a matrix of a tensor whose codes and scales are contiguous.
pub fn matrices(
    to: Codes,
    block: [u64; 2],
    values: super::quantized::Strided<'_>,
    codes: u64,
    scales: u64,
) -> Vec<Numbers> {
    let (leading, size) = super::quantized::matrices(values.shape);
    let count = if values.shape.contains(&0) { 0 } else { leading.iter().product::<u64>() };
    let counts = grid(size, block);
    let scale_bytes = to_u64(size_of::<f32>());
    (0..count)
        .map(|matrix| Numbers {
            to,
            from: values.dtype,
            size,
            first_row: 0,
            block,
            values: values.matrix_at(leading, matrix),
            strides: values.last_strides(),
            codes: codes + matrix * size[0] * size[1],
            scales: scales + matrix * counts[0] * counts[1] * scale_bytes,
        })
        .collect()
}
