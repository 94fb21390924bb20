//! Stops profiles.

use super::guard::guard;
use crate::error::Result;
use crate::profile;

pub(super) fn profile_stop(id: i64) -> Result<String> {
    guard(|| profile::stop(id))
}
