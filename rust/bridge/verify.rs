//! Verification of whole checkpoints.

use super::guard::guard_with_log;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::verify::{Compared, Request, Verify};
use crate::error::Result;
use crate::load::check;
use crate::options::Options;

/// Reads all data of a checkpoint, and compares their digests and authentication codes.
pub(super) fn verify_checkpoint(paths: &[String], verify: &str) -> Result<()> {
    guard_with_log(|| {
        let options = Options::from_env()?;
        match Request::read(verify)?.verify {
            Verify::Manifest(manifest) => check::check_files(paths, &manifest, &options),
            verify => {
                let checkpoint = Checkpoint::open_with(paths, &verify.into())?;
                checkpoint.check_index()?;
                check::check_part(&checkpoint, Compared::All, 0, 1, &options)
            }
        }
    })
}
