//! Table of dtypes: name, which is that in a safetensors header, bits of an element, and PyTorch's scalar type.
//!
//! `csrc/kernels/dtype.h` and the Python package restate parts of this table. Tests compare them.

use std::fmt;

/// An element type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are as in the safetensors format, or like them")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    F4,
    F6E2M3,
    F6E3M2,
    C32,
    C128,
}

/// Row of the table.
struct Row {
    dtype: Dtype,
    name: &'static str,
    bits: u64,
    /// Value of `c10::ScalarType`, or `None` if PyTorch has no such type.
    scalar_type: Option<i8>,
}

const fn row(dtype: Dtype, name: &'static str, bits: u64, scalar_type: i8) -> Row {
    Row { dtype, name, bits, scalar_type: Some(scalar_type) }
}

/// Number of dtypes of the safetensors format. They come first in the table.
const SAFETENSORS_DTYPES: usize = 22;

/// All dtypes. Dtypes of the safetensors format are in the order of their tensors in a file: the widest first, so that each
/// tensor is aligned. The `safetensors` package has the same order.
const TABLE: [Row; 24] = [
    row(Dtype::U64, "U64", 64, 29),
    row(Dtype::I64, "I64", 64, 4),
    row(Dtype::F64, "F64", 64, 7),
    row(Dtype::C64, "C64", 64, 9),
    row(Dtype::F32, "F32", 32, 6),
    row(Dtype::U32, "U32", 32, 28),
    row(Dtype::I32, "I32", 32, 3),
    row(Dtype::BF16, "BF16", 16, 15),
    row(Dtype::F16, "F16", 16, 5),
    row(Dtype::U16, "U16", 16, 27),
    row(Dtype::I16, "I16", 16, 2),
    row(Dtype::F8E5M2Fnuz, "F8_E5M2FNUZ", 8, 25),
    row(Dtype::F8E4M3Fnuz, "F8_E4M3FNUZ", 8, 26),
    row(Dtype::F8E8M0, "F8_E8M0", 8, 44),
    row(Dtype::F8E4M3, "F8_E4M3", 8, 24),
    row(Dtype::F8E5M2, "F8_E5M2", 8, 23),
    row(Dtype::I8, "I8", 8, 1),
    row(Dtype::U8, "U8", 8, 0),
    Row { dtype: Dtype::F6E3M2, name: "F6_E3M2", bits: 6, scalar_type: None },
    Row { dtype: Dtype::F6E2M3, name: "F6_E2M3", bits: 6, scalar_type: None },
    // PyTorch packs two 4-bit floats into one element of one byte.
    row(Dtype::F4, "F4", 4, 45),
    row(Dtype::Bool, "BOOL", 8, 11),
    row(Dtype::C32, "C32", 32, 8),
    row(Dtype::C128, "C128", 128, 10),
];

/// Bit layout of an 8-bit float with a sign. csrc/kernels/dtype.h has the same values for the device kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float8 {
    /// Number of mantissa bits.
    pub mantissa_bits: u32,
    /// Exponent bias.
    pub bias: u32,
    /// First code, without the sign, that is not a finite number.
    pub finite_end: u32,
}

impl Float8 {
    /// E5M2, which has infinity and NaN as the wider formats do.
    pub const E5M2: Float8 = Float8 { mantissa_bits: 2, bias: 15, finite_end: 0x7c };
    /// E4M3, which has no infinity.
    pub const E4M3: Float8 = Float8 { mantissa_bits: 3, bias: 7, finite_end: 0x7f };
    /// E5M2 with neither infinity nor negative zero.
    pub const E5M2_FNUZ: Float8 = Float8 { mantissa_bits: 2, bias: 16, finite_end: 0x80 };
    /// E4M3 with neither infinity nor negative zero.
    pub const E4M3_FNUZ: Float8 = Float8 { mantissa_bits: 3, bias: 8, finite_end: 0x80 };
}

impl Dtype {
    /// Iterates over every dtype of the safetensors format.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().take(SAFETENSORS_DTYPES).map(|row| row.dtype)
    }

    /// Returns the dtype with this name in a safetensors header.
    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().take(SAFETENSORS_DTYPES).find(|row| row.name == name).map(|row| row.dtype)
    }

    /// Returns whether the safetensors format has the dtype.
    pub fn is_in_safetensors(self) -> bool {
        Dtype::all().any(|dtype| dtype == self)
    }

    /// Returns the dtype of PyTorch's scalar type with this value.
    pub fn from_scalar_type(value: i8) -> Option<Dtype> {
        TABLE.iter().find(|row| row.scalar_type == Some(value)).map(|row| row.dtype)
    }

    fn row(self) -> &'static Row {
        // A test checks that every dtype has a row, so the fallback is unused.
        TABLE.iter().find(|row| row.dtype == self).unwrap_or(&TABLE[0])
    }

    /// Returns the name, which is that in a safetensors header if that format has the dtype.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the rank by which tensors are sorted in a file: the dtype's position in the table.
    pub(crate) fn file_rank(self) -> Option<usize> {
        TABLE.iter().position(|row| row.dtype == self)
    }

    /// Returns the number of bits of one element.
    pub fn bits(self) -> u64 {
        self.row().bits
    }

    /// Returns the value of `c10::ScalarType`, or `None` if PyTorch has no such type.
    pub fn scalar_type(self) -> Option<i8> {
        self.row().scalar_type
    }

    /// Returns the bit layout of an 8-bit float with a sign, and `None` for other dtypes.
    pub fn float8(self) -> Option<Float8> {
        match self {
            Dtype::F8E4M3 => Some(Float8::E4M3),
            Dtype::F8E5M2 => Some(Float8::E5M2),
            Dtype::F8E4M3Fnuz => Some(Float8::E4M3_FNUZ),
            Dtype::F8E5M2Fnuz => Some(Float8::E5M2_FNUZ),
            _ => None,
        }
    }

    /// Returns the number of elements in the file that PyTorch packs into one of its elements.
    pub fn packed_elements(self) -> u64 {
        if self == Dtype::F4 { 2 } else { 1 }
    }

    /// Returns the size of one PyTorch element in bytes.
    pub fn item_bytes(self) -> u64 {
        (self.bits() * self.packed_elements()).div_ceil(8)
    }

    /// Returns whether elements are floating-point numbers of at least 8 bits. Casts produce only these dtypes.
    pub fn is_float(self) -> bool {
        let is_narrow =
            matches!(self, Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E8M0 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz);
        self.is_castable() || is_narrow
    }

    /// Returns whether a load with `dtype=` casts tensors of this dtype: floating point of at least 16 bits.
    ///
    /// Integers are not weights, and narrow floats have no meaning without their scales.
    pub fn is_castable(self) -> bool {
        matches!(self, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
