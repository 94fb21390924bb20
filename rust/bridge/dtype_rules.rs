//! Dtypes that loads request by patterns.

use super::ffi;
use super::guard::guard;
use super::selection::scalar_type;
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::dtype::Dtype;
use crate::error::Result;

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
