//! Options of remote stores.

use super::guard::guard;
use crate::error::{Error, Kind, Result};
use crate::remote::stores::store_options;

/// Sets options of the URLs that begin with `url`.
pub(super) fn configure_storage(url: &str, names: &[String], values: &[String]) -> Result<()> {
    guard(|| {
        if names.len() != values.len() {
            let message = format!("{} names, but {} values; give one value for each name", names.len(), values.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        store_options::configure(url, names.iter().cloned().zip(values.iter().cloned()).collect())
    })
}
