//! Names of tensors that loads have not verified, although digests were requested.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::error::Result;
use crate::os::mutex::Mutex;
use std::collections::BTreeSet;
use std::mem;

/// Maximum number of tensors that a warning names. The log has all of them.
const NAMES_MAX: usize = 20;

/// Names of tensors that loads of a checkpoint have not verified, until the caller warns of them.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct Unverified(Mutex<BTreeSet<String>>);

impl Checkpoint {
    /// Fails if digests were requested that do not cover regions of a load. If the request allows them, logs their names,
    /// and keeps these for [`take_unverified`](Checkpoint::take_unverified).
    pub fn check_coverage(&self, regions: &[TensorRegion]) -> Result<()> {
        let names = self.without_digests(regions)?;
        if !names.is_empty() {
            tracing::warn!(?names, "the digests do not cover these tensors or parts of tensors");
            let mut kept = self.unverified.0.lock();
            kept.extend(names.into_iter().map(str::to_owned));
        }
        Ok(())
    }

    /// Returns the text of a warning about the tensors that loads have not verified since the last call. Empty if there
    /// are none.
    pub fn take_unverified(&self) -> String {
        let names = mem::take(&mut *self.unverified.0.lock());
        if names.is_empty() {
            return String::new();
        }
        let shown: Vec<_> = names.iter().take(NAMES_MAX).map(|name| format!("\"{name}\"")).collect();
        let more = names.len().saturating_sub(NAMES_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("the digests do not cover what was loaded of {}{more}, so it was not verified", shown.join(", "))
    }
}
