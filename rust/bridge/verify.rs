//! Digests of whole files, and signatures of models.

use super::guard::guard_with_log;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::verify::{Compared, Request, SignatureRequest, Verify, read_manifest};
use crate::error::{Error, Kind, Result};
use crate::load::model::{Rules, StatementRequest};
use crate::load::{check, model};
use crate::options::Options;
use serde::Deserialize;
use std::path::Path;

/// Reads all data of a checkpoint, and compares their digests and authentication codes.
pub(super) fn verify_checkpoint(paths: &[String], verify: &str) -> Result<()> {
    guard_with_log(|| {
        let options = Options::from_env()?;
        match Request::read(verify)?.verify {
            Verify::Manifest(manifest) => check::check_files(paths, &manifest, &options),
            verify => check::check_part(&Checkpoint::open_with(paths, &verify.into())?, Compared::All, 0, 1, &options),
        }
    })
}

/// Compares all files of a manifest, below a directory or a URL, and returns their number.
pub(super) fn verify_files(manifest: &str, directory: &str) -> Result<i64> {
    guard_with_log(|| {
        let manifest = read_manifest(Path::new(manifest))?;
        check::check_manifest(&manifest, Path::new(directory), &Options::from_env()?)?;
        Ok(i64::try_from(manifest.entries().len()).unwrap_or(i64::MAX))
    })
}

/// Verifies the signature of a model, compares all files with it, and returns their number.
pub(super) fn verify_model(request: &str, path: &str) -> Result<i64> {
    #[derive(Deserialize)]
    struct Request {
        signature: SignatureRequest,
        rules: Rules,
    }
    guard_with_log(|| {
        let Request { signature, rules } = parse(request)?;
        let count = model::verify(&signature, &rules, Path::new(path), &Options::from_env()?)?;
        Ok(i64::try_from(count).unwrap_or(i64::MAX))
    })
}

/// Returns the statement about the files of a model, for a new signature.
pub(super) fn model_statement(request: &str, path: &str) -> Result<String> {
    guard_with_log(|| model::statement(&parse::<StatementRequest>(request)?, Path::new(path), &Options::from_env()?))
}

fn parse<'a, T: Deserialize<'a>>(request: &'a str) -> Result<T> {
    let invalid = |error| Error::new(Kind::InvalidArgument, format!("the request is not valid: {error}"));
    serde_json::from_str(request).map_err(invalid)
}
