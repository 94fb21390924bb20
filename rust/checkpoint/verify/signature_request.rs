//! Requests to verify a signature.

use super::{begins_with_object, parse_request, read_whole};
use crate::error::{Error, Kind, Result};
use crate::signature::key::PublicKey;
use crate::signature::statement::Statement;
use crate::signature::{self, Parts, Signed};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Request to verify a signature, and then data with the manifest in it. Its text is a JSON object:
/// `{"signature": {"path": "model.sig", "public_key": "key.pub"}}`.
#[derive(Debug, Deserialize)]
pub struct SignatureRequest {
    /// Path or URL of the bundle, such as `model.sig`.
    pub path: PathBuf,
    public_key: Option<PathBuf>,
    /// Statement of a signature that the caller has verified.
    statement: Option<String>,
}

impl SignatureRequest {
    /// Parses a request, or returns `None` if the text is another one.
    pub fn parse(text: &str) -> Result<Option<SignatureRequest>> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Text {
            signature: SignatureRequest,
        }
        if !begins_with_object(text, "signature") {
            return Ok(None);
        }
        parse_request(text).map(|Text { signature }| Some(signature))
    }

    /// Verifies the signature. Fails with `invalid-argument` without a key or statement.
    pub fn verify(&self) -> Result<Signed> {
        match (&self.public_key, &self.statement) {
            (Some(key), None) => {
                let key = read_whole(key, "a key", PublicKey::from_pem)?;
                read_whole(&self.path, "a signature", |bytes| signature::verify(bytes, &key))
            }
            (None, Some(statement)) => Statement::parse(statement.as_bytes()).map_err(|error| error.at(&self.path)),
            _ => {
                let message = "the request to verify a signature needs a public key; fst.Signature in Python, and `fst \
                               verify`, also verify with certificates or an identity";
                Err(Error::new(Kind::InvalidArgument, message).at(&self.path))
            }
        }
    }
}

/// Reads the parts of the signature at a path or URL, as [`signature::parts`] returns them.
pub fn signature_parts(path: &Path, hint: Option<&str>) -> Result<Parts> {
    read_whole(path, "a signature", |bytes| signature::parts(bytes, hint))
}
