//! Dtypes that loads request by patterns.

use super::ffi;
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Decodes rules.
pub(super) fn rules(rules: &[ffi::DtypeRule]) -> DtypeRules {
    DtypeRules::new(rules.iter().map(|rule| (&*rule.pattern, Dtype::from_scalar_type(rule.scalar_type))))
}

/// Returns the number of the dtype that patterns request for each of all names, or `None` for the stored one.
pub(super) fn requested(
    names: &[String],
    patterns: &[String],
    dtypes: impl IntoIterator<Item = Option<i8>>,
) -> Result<Vec<Option<i8>>> {
    let dtypes = dtypes.into_iter().map(|number| number.and_then(Dtype::from_scalar_type));
    let rules = DtypeRules::new(patterns.iter().map(|pattern| &**pattern).zip(dtypes));
    let all = || names.iter().map(|name| &**name);
    rules.resolve(all(), all)?.into_iter().map(|dtype| dtype.map(scalar_type).transpose()).collect()
}

/// Returns the number of a dtype in PyTorch.
pub(super) fn scalar_type(dtype: Dtype) -> Result<i8> {
    dtype.scalar_type().ok_or_else(|| Error::new(Kind::Internal, "no scalar type"))
}
