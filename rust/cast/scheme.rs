//! Schemes of quantized weights: dtypes of codes and scales, and the arithmetic that makes numbers of them.
//!
//! Every scheme computes `(code * factor) * second factor` in f32, and rounds the result once to the target dtype. The
//! factors are those of a block. csrc/kernels/dequantize.h restates them for the device kernels.

use super::float8;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, named_enum};
use half::{bf16, f16};

named_enum! {
    /// Way in which codes and scales become numbers.
    Scheme,
    /// Returns the name, as operators and rules have it.
    name:
    /// A number of 8 bits times the scale of its block.
    Scale = "scale",
    /// Two 4-bit floats in a byte, times the scale of their block.
    Fp4 = "fp4",
    /// Two 4-bit floats in a byte, times a power of two. The exponent 255 is 2^128, as in gpt-oss.
    Mxfp4 = "mxfp4",
    /// Two 4-bit floats in a byte, times the product of the block's scale and the global scale.
    Nvfp4 = "nvfp4",
    /// Two 4-bit floats in a byte, times the quotient of the block's scale and the global scale.
    Nvfp4Div = "nvfp4_div",
    /// Two 4-bit floats in a byte, times the block's scale, and then times the global scale.
    Nvfp4Last = "nvfp4_last",
}

/// Values of the 4-bit float E2M1, by code.
pub const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const F32_MANTISSA_BITS: u32 = 23;

impl Scheme {
    /// Returns the scheme with this name. Fails with `invalid-argument` for any other name.
    pub fn parse(name: &str) -> Result<Scheme> {
        Scheme::ALL.iter().copied().find(|scheme| scheme.name() == name).ok_or_else(|| {
            let known: Vec<_> = Scheme::ALL.iter().map(|scheme| scheme.name()).collect();
            let text = format!("the scheme {name:?} is not known; the schemes are {}", known.join(", "));
            Error::new(Kind::InvalidArgument, text)
        })
    }

    /// Returns the number of codes in a stored byte.
    pub fn codes_per_byte(self) -> u64 {
        if self == Scheme::Scale { 1 } else { 2 }
    }

    /// Returns whether the scheme has a global scale.
    pub fn has_global_scale(self) -> bool {
        matches!(self, Scheme::Nvfp4 | Scheme::Nvfp4Div | Scheme::Nvfp4Last)
    }

    /// Returns the rows and columns of a block, or `None` if the scheme has no usual block.
    pub fn usual_block(self) -> Option<[u64; 2]> {
        match self {
            Scheme::Scale => None,
            Scheme::Fp4 | Scheme::Mxfp4 => Some([1, 32]),
            Scheme::Nvfp4 | Scheme::Nvfp4Div | Scheme::Nvfp4Last => Some([1, 16]),
        }
    }

    /// Returns the dtypes that codes may have.
    pub fn code_dtypes(self) -> &'static [Dtype] {
        match self {
            Scheme::Scale => &[Dtype::F8E4M3, Dtype::F8E5M2, Dtype::F8E4M3Fnuz, Dtype::F8E5M2Fnuz, Dtype::I8],
            _ => &[Dtype::U8, Dtype::I8, Dtype::F4],
        }
    }

    /// Returns the dtypes that scales may have.
    pub fn scale_dtypes(self) -> &'static [Dtype] {
        match self {
            Scheme::Scale | Scheme::Fp4 => &[Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8E8M0, Dtype::U8],
            Scheme::Mxfp4 => &[Dtype::U8],
            Scheme::Nvfp4 | Scheme::Nvfp4Div | Scheme::Nvfp4Last => &[Dtype::F8E4M3],
        }
    }

    /// Returns the factors of a block with a scale of this dtype and these bits.
    pub fn factors(self, dtype: Dtype, bits: u32, global_scale: f32) -> [f32; 2] {
        match self {
            Scheme::Scale | Scheme::Fp4 => [scale_value(dtype, bits), 1.0],
            // f32 has no 2^128.
            Scheme::Mxfp4 if bits == 0xff => [scale_value(dtype, 0xfe), 2.0],
            Scheme::Mxfp4 => [scale_value(dtype, bits), 1.0],
            Scheme::Nvfp4 => [scale_value(dtype, bits) * global_scale, 1.0],
            Scheme::Nvfp4Div => [scale_value(dtype, bits) / global_scale, 1.0],
            Scheme::Nvfp4Last => [scale_value(dtype, bits), global_scale],
        }
    }
}

/// Returns the value of a scale. A scale of U8 is an exponent, and its largest one is infinity.
fn scale_value(dtype: Dtype, bits: u32) -> f32 {
    let [low, high, ..] = bits.to_le_bytes();
    match dtype {
        Dtype::BF16 => bf16::from_le_bytes([low, high]).to_f32(),
        Dtype::F16 => f16::from_le_bytes([low, high]).to_f32(),
        Dtype::F8E4M3 => float8::E4M3_VALUES.of(low),
        Dtype::F8E8M0 => float8::E8M0_VALUES.of(low),
        Dtype::U8 if bits == 0 => f32::from_bits(1 << (F32_MANTISSA_BITS - 1)),
        Dtype::U8 => f32::from_bits(bits << F32_MANTISSA_BITS),
        // `Scheme::scale_dtypes` has no others.
        _ => f32::from_bits(bits),
    }
}
