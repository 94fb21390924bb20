//! Dtypes that loads request by patterns.

use super::ffi;
use super::guard::guard;
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Number of the dtype of tensors that keep theirs.
const KEPT: i8 = -1;

/// Decodes rules.
pub(super) fn rules(rules: &[ffi::DtypeRule]) -> DtypeRules {
    DtypeRules::new(rules.iter().map(|rule| (&*rule.pattern, Dtype::from_scalar_type(rule.scalar_type))))
}

/// Returns the number of the dtype that rules request for each of all names, or -1.
pub(super) fn requested_scalar_types(names: &[String], requested: &[ffi::DtypeRule]) -> Result<Vec<i8>> {
    guard(|| {
        let all = || names.iter().map(|name| &**name);
        let dtypes = rules(requested).resolve(all(), all)?;
        dtypes.into_iter().map(|dtype| dtype.map_or(Ok(KEPT), scalar_type)).collect()
    })
}

/// Returns the number of a dtype in PyTorch.
pub(super) fn scalar_type(dtype: Dtype) -> Result<i8> {
    dtype.scalar_type().ok_or_else(|| Error::new(Kind::Internal, "no scalar type"))
}
