//! Tasks of the dequantization kernel: matrices of codes, with their scales and targets. Pure: it holds addresses and
//! touches no device.
//!
//! csrc/kernels/dequantize.h declares the same layout.

use super::matrix::Matrix;
use super::scheme::Scheme;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Number of matrices that fit a [`MatrixBatch`].
pub const BATCH_MATRICES: usize = 30;
/// Numbers that a thread of the kernel computes at a time: neighbors in the target.
const CHUNK_NUMBERS: u64 = 8;
/// Chunks of a tile. A thread block processes one tile at a time.
const TILE_CHUNKS: u64 = 1024;

/// [`Matrix`], as the kernel reads it. Dtypes are numbers of `c10::ScalarType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MatrixTask {
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
    /// Number of tiles of all previous matrices of the batch.
    first_tile: u32,
    scheme: u8,
    from: u8,
    scale_dtype: u8,
    to: u8,
}

/// Matrices as a kernel parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MatrixBatch {
    /// Number of valid matrices.
    pub matrix_count: u32,
    /// Number of tiles of all matrices.
    pub tile_count: u32,
    /// Matrices, padded with zeros.
    pub matrices: [MatrixTask; BATCH_MATRICES],
}

// Every driver accepts 4096 bytes of parameters, and the kernel's declaration has these sizes.
const _: () = assert!(size_of::<MatrixTask>() == 136 && size_of::<MatrixBatch>() == 4088);

/// Returns the matrices in batches that fit a kernel's parameters. Fails with `internal` for an address that is not
/// aligned to its elements, a target that is not a float of 16 bits or more, or more than 2^32 - 1 tiles.
pub fn batches(matrices: &[Matrix]) -> Result<Vec<MatrixBatch>> {
    let mut batches = Vec::new();
    for group in matrices.chunks(BATCH_MATRICES) {
        let mut batch = MatrixBatch::default();
        for (task, matrix) in batch.matrices.iter_mut().zip(group) {
            *task = matrix.task(batch.tile_count)?;
            batch.matrix_count += 1;
            let tiles = u32::try_from(matrix.tiles()).ok().and_then(|tiles| batch.tile_count.checked_add(tiles));
            batch.tile_count = tiles.ok_or_else(|| matrix.invalid("has too many tiles for one launch"))?;
        }
        batches.push(batch);
    }
    Ok(batches)
}

impl Matrix {
    fn task(&self, first_tile: u32) -> Result<MatrixTask> {
        let dtype = |dtype: Dtype| dtype.scalar_type().and_then(|number| u8::try_from(number).ok());
        let dtypes = dtype(self.from).zip(dtype(self.scale_dtype)).zip(dtype(self.to));
        let ((from, scale_dtype), to) = dtypes
            .filter(|_| self.to.is_castable())
            .ok_or_else(|| self.invalid("has a dtype that the kernel does not know"))?;
        let global_scale = self.global_scale.unwrap_or_default();
        let addresses = [(self.scales, self.scale_dtype), (global_scale, Dtype::F32), (self.target, self.to)];
        if !addresses.iter().all(|(address, dtype)| address.is_multiple_of(dtype.item_bytes())) {
            return Err(self.invalid("has an address that is not aligned to its elements"));
        }
        Ok(MatrixTask {
            codes: self.codes,
            scales: self.scales,
            global_scale,
            target: self.target,
            size: self.size,
            begin: self.begin,
            block: self.block,
            code_strides: self.code_strides,
            scale_strides: self.scale_strides,
            target_strides: self.target_strides,
            first_tile,
            scheme: kernel_number(self.scheme),
            from,
            scale_dtype,
            to,
        })
    }

    /// Returns the number of tiles. Chunks are parts of columns if these are contiguous in the target, else of rows.
    fn tiles(&self) -> u64 {
        let [rows, columns] = self.size;
        let is_down = self.target_strides[0] == self.to.item_bytes() && !self.has_rows();
        let [lines, length] = if is_down { [columns, rows] } else { [rows, columns] };
        lines.saturating_mul(length.div_ceil(CHUNK_NUMBERS)).div_ceil(TILE_CHUNKS)
    }

    fn invalid(&self, why: &str) -> Error {
        Error::new(Kind::Internal, format!("{self:?} {why}"))
    }
}

/// Returns the number of a scheme in csrc/kernels/dequantize.h.
fn kernel_number(scheme: Scheme) -> u8 {
    match scheme {
        Scheme::Scale => 0,
        Scheme::Fp4 => 1,
        Scheme::Mxfp4 => 2,
        Scheme::Nvfp4 => 3,
        Scheme::Nvfp4Div => 4,
        Scheme::Nvfp4Last => 5,
    }
}
