//! The one table of dtypes: the name in a safetensors header, the bits of an
//! element, and the PyTorch scalar type that holds it.

use std::fmt;

/// An element type of the safetensors format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the format")]
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
}

/// One row of the table.
struct Row {
    dtype: Dtype,
    name: &'static str,
    bits: u64,
    /// The value of `c10::ScalarType`, or `None` where PyTorch has no such type.
    scalar_type: Option<i8>,
}

const fn row(dtype: Dtype, name: &'static str, bits: u64, scalar_type: i8) -> Row {
    Row { dtype, name, bits, scalar_type: Some(scalar_type) }
}

const TABLE: [Row; 22] = [
    row(Dtype::Bool, "BOOL", 8, 11),
    row(Dtype::U8, "U8", 8, 0),
    row(Dtype::I8, "I8", 8, 1),
    row(Dtype::U16, "U16", 16, 27),
    row(Dtype::I16, "I16", 16, 2),
    row(Dtype::U32, "U32", 32, 28),
    row(Dtype::I32, "I32", 32, 3),
    row(Dtype::U64, "U64", 64, 29),
    row(Dtype::I64, "I64", 64, 4),
    row(Dtype::F16, "F16", 16, 5),
    row(Dtype::BF16, "BF16", 16, 15),
    row(Dtype::F32, "F32", 32, 6),
    row(Dtype::F64, "F64", 64, 7),
    row(Dtype::C64, "C64", 64, 9),
    row(Dtype::F8E4M3, "F8_E4M3", 8, 24),
    row(Dtype::F8E5M2, "F8_E5M2", 8, 23),
    row(Dtype::F8E8M0, "F8_E8M0", 8, 44),
    row(Dtype::F8E4M3Fnuz, "F8_E4M3FNUZ", 8, 26),
    row(Dtype::F8E5M2Fnuz, "F8_E5M2FNUZ", 8, 25),
    // PyTorch keeps two 4-bit floats in one element of one byte.
    row(Dtype::F4, "F4", 4, 45),
    Row { dtype: Dtype::F6E2M3, name: "F6_E2M3", bits: 6, scalar_type: None },
    Row { dtype: Dtype::F6E3M2, name: "F6_E3M2", bits: 6, scalar_type: None },
];

impl Dtype {
    /// Every dtype of the format.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.dtype)
    }

    /// The dtype with this name in a header.
    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.dtype)
    }

    /// The dtype that PyTorch's scalar type with this value holds.
    pub fn from_scalar_type(value: i8) -> Option<Dtype> {
        TABLE.iter().find(|row| row.scalar_type == Some(value)).map(|row| row.dtype)
    }

    fn row(self) -> &'static Row {
        // Every dtype has its row, which a test checks; the fallback is never taken.
        TABLE.iter().find(|row| row.dtype == self).unwrap_or(&TABLE[0])
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        self.row().bits
    }

    /// The value of PyTorch's `c10::ScalarType`, or `None` where there is none.
    pub fn scalar_type(self) -> Option<i8> {
        self.row().scalar_type
    }

    /// How many elements of the file PyTorch keeps in one of its own.
    pub fn packed_elements(self) -> u64 {
        if self == Dtype::F4 { 2 } else { 1 }
    }

    /// Bytes that PyTorch needs for one of its elements.
    pub fn item_bytes(self) -> u64 {
        (self.bits() * self.packed_elements()).div_ceil(8)
    }

    /// Whether its elements are floating-point numbers of 8 bits or more, which are what casts can make.
    pub fn is_float(self) -> bool {
        let is_narrow =
            matches!(self, Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E8M0 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz);
        self.is_castable() || is_narrow
    }

    /// Whether a load with `dtype=` casts tensors of this type: floating point of 16 bits and more.
    /// Integers are not weights to be cast, and the narrow floats mean nothing without their scales.
    pub fn is_castable(self) -> bool {
        matches!(self, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
