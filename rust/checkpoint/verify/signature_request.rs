//! Requests to verify a signature.

use super::{begins_with_object, parse_request, read_whole};
use crate::error::{Error, Kind, Result};
use crate::signature::certificate::Certificate;
use crate::signature::statement::Statement;
use crate::signature::{self, Signed, Trust};
use serde::Deserialize;
use std::path::PathBuf;

/// Request to verify a signature, and then data with the manifest in it. Its text is a JSON object:
/// `{"signature": {"path": "model.sig", "public_key": "key.pub"}}`, or `"certificate_chain": ["ca.pem"]` in place of
/// the key.
#[derive(Debug, Deserialize)]
pub struct SignatureRequest {
    /// Path or URL of the bundle, such as `model.sig`.
    pub path: PathBuf,
    public_key: Option<PathBuf>,
    #[serde(default)]
    certificate_chain: Vec<PathBuf>,
    /// Statement of a signature that the caller has verified.
    statement: Option<String>,
}

impl SignatureRequest {
    /// Parses a request, or returns `None` if the text is another one.
    ///
    /// # Errors
    /// `invalid-argument`.
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

    /// Verifies the signature.
    ///
    /// # Errors
    /// `invalid-argument` unless there is either a key or certificates; those of [`Trust`], of [`signature::verify`] and
    /// of opening the files.
    pub fn verify(&self) -> Result<Signed> {
        let trust = match (&self.public_key, self.certificate_chain.as_slice(), &self.statement) {
            (None, [], Some(statement)) => {
                return Statement::parse(statement.as_bytes()).map_err(|error| error.at(&self.path));
            }
            (Some(key), [], None) => read_whole(key, "a key", Trust::from_public_key)?,
            (None, [_, ..], None) => {
                let read = |path: &PathBuf| read_whole(path, "a certificate", Certificate::parse_pem);
                let certificates: Vec<_> = self.certificate_chain.iter().map(read).collect::<Result<_>>()?;
                Trust::from_certificates(certificates.concat())?
            }
            _ => {
                let message = "a signature is verified with either a public key or a certificate chain";
                return Err(Error::new(Kind::InvalidArgument, message).at(&self.path));
            }
        };
        read_whole(&self.path, "a signature", |bytes| signature::verify(bytes, &trust))
    }
}
