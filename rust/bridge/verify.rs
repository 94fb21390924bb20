//! Digests of whole files.

use super::guard::{guard, start_log};
use crate::checkpoint::verify::read_manifest;
use crate::error::Result;
use crate::load::check;
use crate::options::Options;
use std::path::Path;

/// Compares all files of a manifest, below a directory or a URL, and returns their number.
pub(super) fn verify_files(manifest: &str, directory: &str) -> Result<i64> {
    guard(|| {
        start_log()?;
        let manifest = read_manifest(Path::new(manifest))?;
        check::check_manifest(&manifest, Path::new(directory), &Options::from_env()?)?;
        Ok(i64::try_from(manifest.entries().len()).unwrap_or(i64::MAX))
    })
}
