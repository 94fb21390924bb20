//! Dtypes that loads request by patterns.

use super::{cast, ffi};
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Number of the dtype of tensors that keep theirs.
const KEPT: i8 = -1;

/// Number of float32.
const FLOAT: i8 = 6;

/// Decodes rules.
pub(super) fn rules(rules: &[ffi::DtypeRule]) -> DtypeRules {
    DtypeRules::new(rules.iter().map(|rule| (&*rule.pattern, Dtype::from_scalar_type(rule.scalar_type))))
}

/// Returns the number of the dtype that patterns request for each of all names, or -1.
pub(super) fn requested(names: Vec<String>, patterns: Vec<String>, dtypes: Vec<i8>) -> Result<Vec<i8>> {
    if let Some(&number) = dtypes.iter().find(|number| **number != KEPT && !cast::can_convert(FLOAT, **number)) {
        let name = Dtype::from_scalar_type(number).map_or("unknown", Dtype::name);
        let message = format!("dtype is {name}, but must be a floating-point dtype of 8 bits or more");
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    let rule = |(pattern, scalar_type)| ffi::DtypeRule { pattern, scalar_type };
    let requested: Vec<_> = patterns.into_iter().zip(dtypes).map(rule).collect();
    let all = || names.iter().map(|name| &**name);
    let dtypes = rules(&requested).resolve(all(), all)?;
    dtypes.into_iter().map(|dtype| dtype.map_or(Ok(KEPT), scalar_type)).collect()
}

/// Returns the number of a dtype in PyTorch.
pub(super) fn scalar_type(dtype: Dtype) -> Result<i8> {
    dtype.scalar_type().ok_or_else(|| Error::new(Kind::Internal, "no scalar type"))
}
