//! Checks and dequantization of quantized tensors.

use super::ffi;
use super::guard::{guard, guard_with_log};
use super::selection::signed;
use crate::cast::dequantize;
use crate::cast::quantize::{self, Codes};
use crate::cast::quantized::{Form, Layout, Quantized, Strided};
use crate::cast::scheme::Scheme;
use crate::device::cuda;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::os::sigint::Watch;

/// Checks dtypes, shapes and block of a quantized tensor, and returns its shapes. Addresses and strides are not used.
pub(super) fn lay_out_quantized(tensor: &ffi::QuantizedTensor) -> Result<ffi::QuantizedLayout> {
    guard(|| {
        let layout = Memory::new(tensor)?.quantized(tensor)?.layout()?;
        Ok(ffi::QuantizedLayout { code_shape: signed(&layout.code_shape)?, shape: signed(&layout.shape)? })
    })
}

/// Dequantizes a tensor on the GPU with this ordinal, or on the host if it is negative. Returns false if the GPU has no
/// kernels. Ctrl-C ends it on the host, and leaves a part of the target unwritten.
///
/// # Safety
/// On the host, the tensors are memory of this process, as [`dequantize::run`] requires. Tensors of a GPU are its memory,
/// and no other stream uses them before this work is complete.
pub(super) unsafe fn dequantize(
    tensor: &ffi::QuantizedTensor,
    target: &ffi::StridedTensor,
    ordinal: i32,
    stream: u64,
    threads: usize,
) -> Result<bool> {
    guard_with_log(|| {
        let memory = Memory::new(tensor)?;
        let quantized = memory.quantized(tensor)?;
        let layout: Layout = quantized.layout()?;
        let target = Tensor::new(target, "target")?;
        let global_scale = memory.global_scale.as_ref().map(Tensor::strided);
        let (codes, scales) = (memory.codes.strided(), memory.scales.strided());
        let matrices = quantized.matrices(&layout, codes, scales, global_scale, target.strided())?;
        if ordinal >= 0 {
            return cuda::convert::dequantize(&matrices, ordinal, stream);
        }
        let watch = Watch::begin();
        // SAFETY: the caller's promise is the same.
        unsafe { dequantize::run(&matrices, threads, &|| watch.check()) }.map(|()| true)
    })
}

/// Checks a scheme and a block, and returns the dtype of the codes and the shape of the scales of a tensor.
pub(super) fn lay_out_codes(scheme: &str, shape: &[i64], block: &[i64]) -> Result<ffi::CodesLayout> {
    guard(|| {
        let codes = Codes::parse(scheme)?;
        let block = quantize::block(block)?;
        let shape = to_unsigned(shape)?;
        let [leading @ .., rows, columns] = &shape[..] else {
            let text = format!("a tensor of {} dimensions has no rows and columns", shape.len());
            return Err(Error::new(Kind::InvalidArgument, text));
        };
        let mut scales = signed(leading)?;
        scales.extend(signed(&quantize::grid([*rows, *columns], block))?);
        Ok(ffi::CodesLayout { scalar_type: codes.dtype().scalar_type().unwrap_or_default(), scales })
    })
}

/// Quantizes a tensor on the host. Ctrl-C ends it, and leaves parts of codes and scales unwritten.
///
/// # Safety
/// The numbers are readable. Codes and scales are contiguous memory of the shapes of [`lay_out_codes`], and all scales
/// are 0.
pub(super) unsafe fn quantize(
    tensor: &ffi::StridedTensor,
    scheme: &str,
    block: &[i64],
    codes: u64,
    scales: u64,
    threads: usize,
) -> Result<()> {
    guard_with_log(|| {
        let tensor = Tensor::new(tensor, "numbers")?;
        let matrices =
            quantize::matrices(Codes::parse(scheme)?, quantize::block(block)?, tensor.strided(), codes, scales);
        let watch = Watch::begin();
        // SAFETY: the caller's promise is the same.
        unsafe { quantize::run(&matrices, threads, &|| watch.check()) }
    })
}

/// Tensor with unsigned sizes and strides.
struct Tensor {
    address: u64,
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl Tensor {
    fn new(tensor: &ffi::StridedTensor, what: &str) -> Result<Tensor> {
        let dtype = Dtype::from_scalar_type(tensor.scalar_type).ok_or_else(|| {
            let text = format!("the {what} have a dtype of PyTorch that fst does not know, {}", tensor.scalar_type);
            Error::new(Kind::InvalidArgument, text)
        })?;
        let (shape, strides) = (to_unsigned(tensor.shape)?, to_unsigned(tensor.strides)?);
        Ok(Tensor { address: tensor.address, dtype, shape, strides })
    }

    fn form(&self) -> Form<'_> {
        Form { dtype: self.dtype, shape: &self.shape }
    }

    fn strided(&self) -> Strided<'_> {
        Strided { address: self.address, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }
}

/// Tensors of a quantized tensor.
struct Memory {
    codes: Tensor,
    scales: Tensor,
    global_scale: Option<Tensor>,
}

impl Memory {
    fn new(tensor: &ffi::QuantizedTensor) -> Result<Memory> {
        let has_global_scale = tensor.global_scale.scalar_type >= 0;
        Ok(Memory {
            codes: Tensor::new(&tensor.codes, "codes")?,
            scales: Tensor::new(&tensor.scales, "scales")?,
            global_scale: has_global_scale.then(|| Tensor::new(&tensor.global_scale, "global scales")).transpose()?,
        })
    }

    fn quantized<'a>(&'a self, tensor: &ffi::QuantizedTensor<'a>) -> Result<Quantized<'a>> {
        Ok(Quantized {
            scheme: Scheme::parse(tensor.scheme)?,
            codes: self.codes.form(),
            scales: self.scales.form(),
            global_scale: self.global_scale.as_ref().map(Tensor::form),
            block: tensor.block,
            begin: tensor.begin,
        })
    }
}

fn to_unsigned(values: &[i64]) -> Result<Vec<u64>> {
    let negative = |_| Error::new(Kind::Internal, format!("{values:?} are sizes or strides of a tensor"));
    values.iter().map(|&value| u64::try_from(value).map_err(negative)).collect()
}
