//! Matrices of codes in memory.

use super::scheme::Scheme;
use crate::dtype::Dtype;
use crate::num::to_usize;
use std::ptr;

/// Matrix of codes, or a part of one, and the memory of its numbers. Strides are those of rows and of columns, in bytes.
/// Two codes in a byte are two columns.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Way in which codes become numbers.
    pub scheme: Scheme,
    /// Dtype of the codes.
    pub from: Dtype,
    /// Dtype of the scales.
    pub scale_dtype: Dtype,
    /// Dtype of the numbers: a float of 16 bits or more.
    pub to: Dtype,
    /// Number of rows and of columns.
    pub size: [u64; 2],
    /// Row and column of the first code in the matrix to which the scales belong.
    pub begin: [u64; 2],
    /// Rows and columns of a block, or 0 for all.
    pub block: [u64; 2],
    /// Address of the first code.
    pub codes: u64,
    /// Strides of the stored bytes.
    pub code_strides: [u64; 2],
    /// Address of the first block's scale.
    pub scales: u64,
    /// Strides of the scales.
    pub scale_strides: [u64; 2],
    /// Address of the global scale, which is an f32, or `None` if the scheme has none.
    pub global_scale: Option<u64>,
    /// Address of the first number, of any alignment.
    pub target: u64,
    /// Strides of the numbers.
    pub target_strides: [u64; 2],
}

impl Matrix {
    pub(super) fn numbers(&self) -> u64 {
        let [rows, columns] = self.size;
        rows.saturating_mul(columns)
    }

    /// Returns whether the rows of the target are contiguous.
    pub(super) fn has_rows(&self) -> bool {
        self.target_strides[1] == self.to.item_bytes()
    }

    pub(super) fn row_bytes(&self) -> usize {
        to_usize(self.code_strides[0])
    }

    pub(super) fn code_at(&self, row: usize, byte: usize) -> *const u8 {
        let codes = ptr::with_exposed_provenance::<u8>(to_usize(self.codes));
        codes.wrapping_add(row * self.row_bytes() + byte * to_usize(self.code_strides[1]))
    }

    pub(super) fn target_at(&self, row: usize, column: usize) -> *mut u8 {
        let target = ptr::with_exposed_provenance_mut::<u8>(to_usize(self.target));
        target.wrapping_add(row * to_usize(self.target_strides[0]) + column * to_usize(self.target_strides[1]))
    }
}
