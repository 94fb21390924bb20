//! Names of dtypes in a `.tensors` file: NumPy's, or its name of raw bytes and PyTorch's name of what they mean.

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Dtypes that NumPy has, with its names.
const NUMPY: [(Dtype, &str); 14] = [
    (Dtype::F32, "<f4"),
    (Dtype::F16, "<f2"),
    (Dtype::F64, "<f8"),
    (Dtype::I64, "<i8"),
    (Dtype::I32, "<i4"),
    (Dtype::I16, "<i2"),
    (Dtype::I8, "|i1"),
    (Dtype::U8, "|u1"),
    (Dtype::Bool, "|b1"),
    (Dtype::U16, "<u2"),
    (Dtype::U32, "<u4"),
    (Dtype::U64, "<u8"),
    (Dtype::C64, "<c8"),
    (Dtype::C128, "<c16"),
];

/// Dtypes that NumPy lacks, with PyTorch's names.
const OPAQUE: [(Dtype, &str); 8] = [
    (Dtype::BF16, "torch.bfloat16"),
    (Dtype::C32, "torch.complex32"),
    (Dtype::F8E5M2, "torch.float8_e5m2"),
    (Dtype::F8E4M3, "torch.float8_e4m3fn"),
    (Dtype::F8E5M2Fnuz, "torch.float8_e5m2fnuz"),
    (Dtype::F8E4M3Fnuz, "torch.float8_e4m3fnuz"),
    (Dtype::F8E8M0, "torch.float8_e8m0fnu"),
    (Dtype::F4, "torch.float4_e2m1fn_x2"),
];

/// Separates both names of a dtype that NumPy lacks.
const SEPARATOR: char = '\0';

/// Returns the dtype with this name in a file. Fails with `unsupported-dtype` if fst has no such dtype; `malformed` if
/// the size of the raw bytes does not fit the dtype.
pub(super) fn parse(name: &str) -> Result<Dtype> {
    if name.is_empty() {
        return Err(Error::new(Kind::Malformed, "the dtype is empty"));
    }
    let unsupported = |message: String| Error::new(Kind::UnsupportedDtype, message);
    let Some((raw, torch_name)) = name.split_once(SEPARATOR) else {
        let known = NUMPY.iter().find(|(_, known)| *known == name).map(|(dtype, _)| *dtype);
        return known.ok_or_else(|| match name.starts_with('>') {
            true => unsupported(format!("the elements are big-endian ({name:?}); write the file on another machine")),
            false => unsupported(format!("fst has no dtype for NumPy's {name:?}")),
        });
    };
    let known = OPAQUE.iter().find(|(_, known)| *known == torch_name).map(|(dtype, _)| *dtype);
    let dtype = known.ok_or_else(|| unsupported(format!("fst has no dtype for {torch_name:?}")))?;
    if raw.get(1..) != raw_name(dtype).get(1..) {
        let message = format!("the dtype {torch_name} has elements of {} bytes, not {raw:?}", dtype.item_bytes());
        return Err(Error::new(Kind::Malformed, message));
    }
    Ok(dtype)
}

/// Returns the name of a dtype in a file, or `None` if PyTorch lacks the dtype.
pub fn name(dtype: Dtype) -> Option<String> {
    if let Some((_, name)) = NUMPY.iter().find(|(known, _)| *known == dtype) {
        return Some((*name).to_owned());
    }
    let opaque = OPAQUE.iter().find(|(known, _)| *known == dtype);
    opaque.map(|(_, torch_name)| format!("{}{SEPARATOR}{torch_name}", raw_name(dtype)))
}

/// Returns whether NumPy has the dtype.
pub fn is_numpy(dtype: Dtype) -> bool {
    NUMPY.iter().any(|(known, _)| *known == dtype)
}

/// Returns NumPy's name of the raw bytes of an element.
fn raw_name(dtype: Dtype) -> String {
    let order = if dtype.item_bytes() == 1 { '|' } else { '<' };
    format!("{order}V{}", dtype.item_bytes())
}
