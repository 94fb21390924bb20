//! Checks of quantized tensors against their scheme, and their matrices.

use super::matrix::Matrix;
use super::scheme::Scheme;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use std::fmt;

/// Dtype and shape of a tensor, in PyTorch's elements: two 4-bit floats are one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form<'a> {
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Sizes of all dimensions.
    pub shape: &'a [u64],
}

/// Quantized tensor, or an index region of its last two dimensions, with the scales of all of the tensor.
#[derive(Clone, Copy, Debug)]
pub struct Quantized<'a> {
    /// Way in which codes become numbers.
    pub scheme: Scheme,
    /// The stored codes: `[..., rows, bytes]`.
    pub codes: Form<'a>,
    /// Their scales: `[..., block rows, block columns]`, or one.
    pub scales: Form<'a>,
    /// The global scale: one, or one for each matrix.
    pub global_scale: Option<Form<'a>>,
    /// Rows and columns of a block, with 0 for all. Empty for the block that scheme and scales imply.
    pub block: &'a [i64],
    /// Row and column of the first code in its tensor. Empty for a whole tensor.
    pub begin: &'a [i64],
}

/// Shapes and block of a valid quantized tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Shape of the codes, in bytes, with the blocks of gpt-oss as one dimension: `[..., rows, bytes]`.
    pub code_shape: Vec<u64>,
    /// Shape of the numbers.
    pub shape: Vec<u64>,
    /// Rows and columns of a block, with 0 for all.
    pub block: [u64; 2],
    /// Row and column of the first code in its tensor.
    pub begin: [u64; 2],
}

/// Tensor in memory. Strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// Address of the first element.
    pub address: u64,
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Sizes of all dimensions.
    pub shape: &'a [u64],
    /// Strides of all dimensions.
    pub strides: &'a [u64],
}

impl Quantized<'_> {
    /// Checks dtypes, shapes and block. Fails with `invalid-argument`. The text names no tensor.
    pub fn layout(&self) -> Result<Layout> {
        self.check_dtypes()?;
        let Quantized { scheme, codes, scales, .. } = *self;
        let code_shape = self.code_shape();
        let per_byte = scheme.codes_per_byte();
        let mut shape = code_shape.clone();
        match shape.last_mut() {
            Some(columns) => {
                *columns = columns.checked_mul(per_byte).ok_or_else(|| invalid("the codes are too many"))?
            }
            None if per_byte > 1 => return Err(invalid("codes of 4 bits need a dimension, in which two share a byte")),
            None => {}
        }
        let begin = self.begin()?;
        let (leading, size) = matrices(&shape);
        let (scales_leading, grid) = matrices(scales.shape);
        // One scale is that of all matrices.
        let is_single = scales.shape.iter().product::<u64>() == 1;
        if !is_single && (scales.shape.len() != code_shape.len() || scales_leading != leading) {
            let text = format!(
                "codes of shape {} need scales with as many dimensions, {}, but the scales have shape {}",
                Shape(codes.shape),
                if leading.is_empty() {
                    "of one matrix".into()
                } else {
                    format!("of which the first are {}", Shape(leading))
                },
                Shape(scales.shape)
            );
            return Err(invalid(text));
        }
        let block = self.block(size, grid)?;
        let mut expected = [0; 2];
        for (expected, ((size, begin), block)) in expected.iter_mut().zip(size.into_iter().zip(begin).zip(block)) {
            let end = begin.checked_add(size).ok_or_else(|| invalid("the codes end beyond 64 bits"))?;
            *expected = if block == 0 { 1 } else { end.div_ceil(block) };
        }
        let is_whole = self.begin.is_empty();
        let fits =
            if is_whole { grid == expected } else { grid.iter().zip(expected).all(|(has, needs)| *has >= needs) };
        if !fits {
            let [rows, columns] = block.map(|size| if size == 0 { "all".to_string() } else { size.to_string() });
            let text = format!(
                "codes of {} x {} numbers{} in blocks of {rows} x {columns} need {}{} x {} scales, but the scales have shape {}",
                size[0],
                size[1],
                if is_whole { String::new() } else { format!(" from row {} and column {} on", begin[0], begin[1]) },
                if is_whole { "" } else { "at least " },
                expected[0],
                expected[1],
                Shape(scales.shape)
            );
            return Err(invalid(text));
        }
        if let Some(global_scale) = self.global_scale {
            let (global_leading, last) = matrices(global_scale.shape);
            let is_single = global_scale.shape.iter().product::<u64>() == 1;
            let is_of_matrices = global_scale.shape == leading || (global_leading == leading && last == [1, 1]);
            if !is_single && !is_of_matrices {
                let text = format!(
                    "the global scale has shape {}, but must be one number, or one for each of the matrices {}",
                    Shape(global_scale.shape),
                    Shape(leading)
                );
                return Err(invalid(text));
            }
        }
        Ok(Layout { code_shape, shape, block, begin })
    }

    fn check_dtypes(&self) -> Result<()> {
        let Quantized { scheme, codes, scales, global_scale, .. } = *self;
        let checks = [("codes", codes.dtype, scheme.code_dtypes()), ("scales", scales.dtype, scheme.scale_dtypes())];
        for (what, dtype, permitted) in checks {
            if !permitted.contains(&dtype) {
                let names: Vec<_> = permitted.iter().map(|dtype| dtype.name()).collect();
                let text =
                    format!("the scheme {:?} has {what} of {}, but these are {dtype}", scheme.name(), names.join(", "));
                return Err(invalid(text));
            }
        }
        match global_scale {
            None if scheme.has_global_scale() => {
                Err(invalid(format!("the scheme {:?} needs a global scale", scheme.name())))
            }
            Some(_) if !scheme.has_global_scale() => {
                Err(invalid(format!("the scheme {:?} has no global scale, but one is given", scheme.name())))
            }
            Some(global_scale) if global_scale.dtype != Dtype::F32 => {
                Err(invalid(format!("the global scale is {}, but must be F32", global_scale.dtype)))
            }
            _ => Ok(()),
        }
    }

    /// Returns the shape of the codes. gpt-oss has a dimension for the bytes of a block, which have one scale.
    fn code_shape(&self) -> Vec<u64> {
        let mut shape = self.codes.shape.to_vec();
        if self.scheme == Scheme::Mxfp4
            && shape.len() == self.scales.shape.len() + 1
            && let [.., blocks, 16] = *shape
        {
            shape.truncate(shape.len() - 2);
            shape.push(blocks.saturating_mul(16));
        }
        shape
    }

    fn begin(&self) -> Result<[u64; 2]> {
        let [row, column] = match self.begin {
            [] => [0, 0],
            [row, column] => [*row, *column],
            _ => return Err(invalid(format!("begin is {:?}, but must be a row and a column", self.begin))),
        };
        let begin = u64::try_from(row).ok().zip(u64::try_from(column).ok());
        let (row, column) = begin.ok_or_else(|| invalid(format!("begin is {:?}, which is negative", self.begin)))?;
        if !column.is_multiple_of(self.scheme.codes_per_byte()) {
            let text = format!("begin is column {column}, which is within a byte; two codes share a byte");
            return Err(invalid(text));
        }
        Ok([row, column])
    }

    /// Returns the block. Without one, scales that are one number or one for each row or column tell.
    fn block(&self, size: [u64; 2], grid: [u64; 2]) -> Result<[u64; 2]> {
        let block = match self.block {
            [] => match self.scheme.usual_block() {
                Some(block) => block,
                None => {
                    let mut block = [0; 2];
                    for (block, (size, count)) in block.iter_mut().zip(size.into_iter().zip(grid)) {
                        *block = match count {
                            1 => 0,
                            _ if count == size && self.begin.is_empty() => 1,
                            _ => {
                                let text = format!(
                                    "scales of shape {} are those of blocks; pass block=[rows, columns]",
                                    Shape(self.scales.shape)
                                );
                                return Err(invalid(text));
                            }
                        };
                    }
                    block
                }
            },
            [rows, columns] => {
                let block = u64::try_from(*rows).ok().zip(u64::try_from(*columns).ok());
                let (rows, columns) =
                    block.ok_or_else(|| invalid(format!("block is {:?}, which is negative", self.block)))?;
                [rows, columns]
            }
            _ => return Err(invalid(format!("block is {:?}, but must be rows and columns", self.block))),
        };
        if !block[1].is_multiple_of(self.scheme.codes_per_byte()) {
            let text = format!("a block of {} columns ends within a byte; two codes share a byte", block[1]);
            return Err(invalid(text));
        }
        Ok(block)
    }

    /// Returns the matrices of a tensor in memory: its codes, scales and global scale, and the target of the numbers.
    /// Codes and target have the shapes of the layout. Fails with `internal` if the target does not.
    pub fn matrices(
        &self,
        layout: &Layout,
        codes: Strided<'_>,
        scales: Strided<'_>,
        global_scale: Option<Strided<'_>>,
        target: Strided<'_>,
    ) -> Result<Vec<Matrix>> {
        if codes.shape != layout.code_shape || target.shape != layout.shape {
            let text = format!("codes {} and target {}", Shape(codes.shape), Shape(target.shape));
            return Err(Error::new(Kind::Internal, text));
        }
        let (leading, size) = matrices(&layout.shape);
        let is_empty = layout.shape.contains(&0);
        let count = if is_empty { 0 } else { leading.iter().product() };
        let at = |tensor: Strided<'_>, matrix: u64| tensor.matrix_at(leading, matrix);
        Ok((0..count)
            .map(|matrix| Matrix {
                scheme: self.scheme,
                from: codes.dtype,
                scale_dtype: scales.dtype,
                to: target.dtype,
                size,
                begin: layout.begin,
                block: layout.block,
                codes: at(codes, matrix),
                code_strides: codes.last_strides(),
                scales: at(scales, matrix),
                scale_strides: scales.last_strides(),
                global_scale: global_scale.map(|scale| at(scale, matrix)),
                target: at(target, matrix),
                target_strides: target.last_strides(),
            })
            .collect())
    }
}

impl Strided<'_> {
    /// Returns the strides of rows and columns in bytes. A tensor of fewer dimensions has one row.
    pub(super) fn last_strides(&self) -> [u64; 2] {
        let item_bytes = self.dtype.item_bytes();
        match *self.strides {
            [] => [0, item_bytes],
            [column] => [0, column * item_bytes],
            [.., row, column] => [row * item_bytes, column * item_bytes],
        }
    }

    /// Returns the address of the matrix with this number among all matrices of the leading dimensions. One matrix or
    /// number is that of all.
    pub(super) fn matrix_at(&self, leading: &[u64], number: u64) -> u64 {
        let dimensions = leading.len().min(self.shape.len());
        let is_single = self.shape.iter().product::<u64>() == 1;
        if is_single {
            return self.address;
        }
        let mut rest = number;
        let mut address = self.address;
        for (size, stride) in leading.iter().zip(self.strides).take(dimensions).rev() {
            address += rest % size * stride * self.dtype.item_bytes();
            rest /= size;
        }
        address
    }
}

/// Splits a shape into its leading dimensions and the rows and columns of a matrix.
pub(super) fn matrices(shape: &[u64]) -> (&[u64], [u64; 2]) {
    match shape {
        [] => (&[], [1, 1]),
        [columns] => (&[], [1, *columns]),
        [leading @ .., rows, columns] => (leading, [*rows, *columns]),
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(Kind::InvalidArgument, text)
}

/// Shape in a message.
struct Shape<'a>(&'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "[{}]", sizes.join(", "))
    }
}
