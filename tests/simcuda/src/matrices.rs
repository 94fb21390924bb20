//! Launches of the dequantization kernel.
//!
//! Memory between rows or columns of a matrix belongs to the matrix if neither its rows nor its columns are contiguous.

use crate::abi::{Kind, Status};
use crate::driver::{Driver, SharedDriver};
use crate::launch::{GuardedBuffer, parameter};
use crate::region::Region;
use crate::task::{u32_at, u64_at};

/// Bytes of a matrix in the parameters.
const MATRIX_BYTES: usize = 136;
/// Matrices that fit into the parameters of a launch.
const BATCH_MATRICES: usize = 30;
/// Numbers that a thread computes at a time.
const CHUNK_NUMBERS: u64 = 8;
/// Chunks of a tile.
const TILE_CHUNKS: u64 = 1024;
/// Number of the scheme with one code in a byte.
const SCALE: u8 = 0;
/// Number of the first scheme with two codes in a byte.
const FP4: u8 = 1;
/// Number of the first scheme with a global scale.
const NVFP4: u8 = 3;
/// Number of the last scheme.
const NVFP4_LAST: u8 = 5;

/// Matrix of codes, as declared in csrc/kernels/dequantize.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    codes: u64,
    scales: u64,
    global_scale: u64,
    target: u64,
    size: [u64; 2],
    begin: [u64; 2],
    block: [u64; 2],
    code_strides: [u64; 2],
    scale_strides: [u64; 2],
    target_strides: [u64; 2],
    first_tile: u32,
    scheme: u8,
    from: u8,
    scale_dtype: u8,
    to: u8,
}

/// Memory that a matrix accesses.
#[derive(Debug)]
struct Accesses {
    codes: Region,
    scales: Region,
    global_scale: Option<Region>,
    target: Region,
}

/// Queued launch.
#[derive(Debug)]
pub struct MatrixLaunch {
    matrices: Vec<Matrix>,
    accesses: Vec<Accesses>,
    tile_count: u32,
    blocks: u32,
    threads: u32,
}

unsafe extern "C" {
    /// Runs the kernel on matrices with host addresses.
    fn fst_sim_dequantize(matrices: *const Matrix, matrix_count: u32, tile_count: u32, blocks: u32, threads: u32);
}

impl Driver {
    /// Checks and records all accesses of a launch of `blocks` blocks of `threads` threads.
    pub fn prepare_matrices(
        &mut self,
        stream: usize,
        [blocks, threads]: [u32; 2],
        parameters: u64,
    ) -> Result<MatrixLaunch, Status> {
        let batch = parameter(parameters, 0, (8 + BATCH_MATRICES * MATRIX_BYTES) as u64)?;
        let (count, tile_count) = (u32_at(&batch, 0) as usize, u32_at(&batch, 4));
        let matrices: Vec<Matrix> = batch[8..].chunks_exact(MATRIX_BYTES).take(count).map(Matrix::parse).collect();
        let accesses = accesses_of(&matrices, count, tile_count).map_err(|text| {
            self.report(Kind::BadLaunch, text);
            Status::InvalidValue
        })?;
        let reads = accesses.iter().flat_map(|matrix| [Some(matrix.codes), Some(matrix.scales), matrix.global_scale]);
        let reads = reads.flatten().map(|region| (region, false));
        let all: Vec<_> = reads.chain(accesses.iter().map(|matrix| (matrix.target, true))).collect();
        // Check all regions first: a rejected launch accesses no memory.
        all.iter().try_for_each(|(region, _)| self.check_live(region, "dequantization"))?;
        all.iter().try_for_each(|&(region, writes)| self.access_on_stream(stream, region, writes, "dequantization"))?;
        Ok(MatrixLaunch { matrices, accesses, tile_count, blocks, threads })
    }
}

/// Returns the memory that each matrix accesses, or describes the error in the parameters.
fn accesses_of(matrices: &[Matrix], count: usize, tile_count: u32) -> Result<Vec<Accesses>, String> {
    if count == 0 || count > BATCH_MATRICES {
        return Err(format!("{count} matrices in the parameters"));
    }
    let mut next_tile = 0;
    let mut accesses = Vec::with_capacity(count);
    for matrix in matrices {
        if u64::from(matrix.first_tile) != next_tile {
            return Err(format!("{next_tile} tiles come before {matrix:?}"));
        }
        next_tile += matrix.tiles();
        accesses.push(matrix.accesses().ok_or_else(|| format!("an impossible matrix: {matrix:?}"))?);
    }
    if u64::from(tile_count) != next_tile {
        return Err(format!("the matrices have {next_tile} tiles, and the launch has {tile_count}"));
    }
    // Matrices are converted in any order.
    for (index, Accesses { target, .. }) in accesses.iter().enumerate() {
        let others = accesses.iter().enumerate().filter(|&(other, _)| other != index).map(|(_, other)| other.target);
        let reads = accesses.iter().flat_map(|other| [Some(other.codes), Some(other.scales), other.global_scale]);
        if let Some(other) = others.chain(reads.flatten()).find(|other| other.overlaps(target)) {
            return Err(format!("a matrix is written to {target}, and another access is at {other}"));
        }
    }
    Ok(accesses)
}

impl Matrix {
    fn parse(row: &[u8]) -> Matrix {
        let pair = |at| [u64_at(row, at), u64_at(row, at + 8)];
        Matrix {
            codes: u64_at(row, 0),
            scales: u64_at(row, 8),
            global_scale: u64_at(row, 16),
            target: u64_at(row, 24),
            size: pair(32),
            begin: pair(48),
            block: pair(64),
            code_strides: pair(80),
            scale_strides: pair(96),
            target_strides: pair(112),
            first_tile: u32_at(row, 128),
            scheme: row[132],
            from: row[133],
            scale_dtype: row[134],
            to: row[135],
        }
    }

    fn number_bytes(&self) -> Option<u64> {
        match self.to {
            5 | 15 => Some(2),
            6 => Some(4),
            7 => Some(8),
            _ => None,
        }
    }

    fn tiles(&self) -> u64 {
        let bytes = self.number_bytes().unwrap_or_default();
        let is_down = self.target_strides[0] == bytes && self.target_strides[1] != bytes;
        let [rows, columns] = self.size;
        let [lines, length] = if is_down { [columns, rows] } else { [rows, columns] };
        lines.saturating_mul(length.div_ceil(CHUNK_NUMBERS)).div_ceil(TILE_CHUNKS)
    }

    /// Returns the memory of the matrix, or `None` for dtypes, sizes or alignments that the kernel does not support.
    fn accesses(&self) -> Option<Accesses> {
        let per_byte = match self.scheme {
            SCALE => matches!(self.from, 1 | 23..=26).then_some(1),
            FP4..=NVFP4_LAST => Some(2),
            _ => None,
        }?;
        let scale_bytes = match self.scale_dtype {
            0 | 24 | 44 => 1,
            5 | 15 => 2,
            6 => 4,
            _ => return None,
        };
        let number_bytes = self.number_bytes()?;
        let is_aligned = self.scales.is_multiple_of(scale_bytes) && self.target.is_multiple_of(number_bytes);
        let has_global_scale = self.scheme >= NVFP4;
        if !is_aligned || !self.global_scale.is_multiple_of(4) || (self.global_scale != 0) != has_global_scale {
            return None;
        }
        let [rows, columns] = self.size;
        let first = |axis: usize| self.begin[axis].checked_div(self.block[axis]).unwrap_or(0);
        let last = |axis: usize| {
            let end = self.begin[axis] + self.size[axis].saturating_sub(1);
            end.checked_div(self.block[axis]).unwrap_or(0)
        };
        let blocks = [0, 1].map(|axis| last(axis) - first(axis) + 1);
        let scales = self.scales + first(0) * self.scale_strides[0] + first(1) * self.scale_strides[1];
        Some(Accesses {
            codes: region(self.codes, [rows, columns.div_ceil(per_byte)], self.code_strides, 1)?,
            scales: region(scales, blocks, self.scale_strides, scale_bytes)?,
            global_scale: has_global_scale.then(|| Region::linear(self.global_scale, 4)).flatten(),
            target: region(self.target, self.size, self.target_strides, number_bytes)?,
        })
    }
}

/// Returns the memory of a matrix with elements of this size.
fn region(address: u64, [rows, columns]: [u64; 2], strides: [u64; 2], item_bytes: u64) -> Option<Region> {
    let lines = [(rows, strides[0], columns, strides[1]), (columns, strides[1], rows, strides[0])];
    let contiguous = lines.into_iter().find_map(|(lines, line_stride, length, stride)| {
        let is_contiguous = stride == item_bytes || length == 1;
        is_contiguous.then(|| Region::new(address, length * item_bytes, line_stride, lines)).flatten()
    });
    let last = rows.checked_sub(1)? * strides[0] + columns.checked_sub(1)? * strides[1];
    contiguous.or_else(|| Region::linear(address, last + item_bytes))
}

impl MatrixLaunch {
    /// Runs every thread of every block.
    pub fn run(self, shared: &SharedDriver, epoch: u64) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        // Freed memory was reported when it was freed.
        let buffer = |region: Region| {
            let region = Region::linear(region.start(), region.span())?;
            Some(GuardedBuffer::new(region, &driver.memory.read(&region)?))
        };
        let buffers = self.accesses.iter().map(|matrix| {
            let global_scale = matrix.global_scale.map(buffer);
            Some((buffer(matrix.codes)?, buffer(matrix.scales)?, global_scale.flatten(), buffer(matrix.target)?))
        });
        let Some(mut buffers) = buffers.collect::<Option<Vec<_>>>() else { return };
        drop(driver);
        let matrices: Vec<Matrix> = std::iter::zip(&self.matrices, &mut buffers)
            .map(|(matrix, (codes, scales, global_scale, target))| {
                // The buffer of scales begins with the first one that the kernel reads.
                let skipped = scales.region.start() - matrix.scales;
                Matrix {
                    codes: codes.address(),
                    scales: scales.address().wrapping_sub(skipped),
                    global_scale: global_scale.as_mut().map_or(0, GuardedBuffer::address),
                    target: target.address(),
                    ..*matrix
                }
            })
            .collect();
        let count = matrices.len() as u32;
        // SAFETY: the matrices were checked, and buffers of the same lengths replace device memory.
        unsafe { fst_sim_dequantize(matrices.as_ptr(), count, self.tile_count, self.blocks, self.threads) };
        driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        for (matrix, (codes, scales, _, target)) in std::iter::zip(&self.accesses, &buffers) {
            if ![codes, scales, target].iter().all(|buffer| buffer.is_guard_intact()) {
                let text = format!("dequantization to {} writes outside of its target", matrix.target);
                driver.report(Kind::OutOfBounds, text);
            }
            driver.memory.write(&matrix.target, &matrix.target.gather(target.bytes()));
        }
    }
}
