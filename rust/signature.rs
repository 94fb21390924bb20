//! Signatures of models in the format of OpenSSF Model Signing (`model.sig`).
//!
//! A signature is a Sigstore [`bundle`] with an envelope of DSSE. The envelope holds a [`statement`], which lists the
//! digests of all files, and an ECDSA signature of it. [`verify`] checks the signature with a [`PublicKey`] of the
//! caller, and returns the [`Manifest`] in the statement. The data are then verified as with any other manifest.
//!
//! The Python package verifies signatures with certificates and with keys on P-521, given the [`parts`] of a bundle, and by
//! identities. It passes the statement (`torch_ext/fst/_signatures/`). It also signs statements.
//!
//! Nothing of the statement is read before its signature is verified.

mod bundle;
pub mod key;
pub mod statement;

use crate::digest::manifest::Manifest;
use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bundle::Bundle;
use key::PublicKey;
use serde::Serialize;
use statement::Statement;

/// Content of a signature that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// Digests of the files.
    pub manifest: Manifest,
    /// Paths that were not signed, relative to the directory of the model. A directory stands for all files in it.
    pub ignored: Vec<String>,
}

/// Verifies the signature of a bundle, and returns what was signed. Fails with `integrity` if the signature is not one
/// of the key; `malformed` with the field if the bundle is not valid. The error has no path.
pub fn verify(bundle: &[u8], key: &PublicKey) -> Result<Signed> {
    let bundle = Bundle::parse(bundle, Some(key.hint()))?;
    if !bundle.messages().iter().any(|message| key.verifies(message, &bundle.signature)) {
        return Err(Error::new(Kind::Integrity, "the signature is not valid for its content and the given key"));
    }
    Statement::parse(&bundle.payload)
}

/// Parts of a signature that the caller verifies, with a key or certificates that [`verify`] does not know.
#[derive(Serialize)]
pub struct Parts {
    /// Certificates in DER and base64: the signer's, and its issuers'.
    certificates: Vec<String>,
    /// Signature in DER and base64.
    signature: String,
    /// Messages of which one is signed, in base64.
    messages: [String; 2],
    /// Statement, which counts if the signature is valid.
    statement: String,
}

/// Returns the parts of a signature that was made with the key of this hint, or with certificates without one. Fails
/// with the errors of [`verify`].
pub fn parts(bundle: &[u8], hint: Option<&str>) -> Result<Parts> {
    let bundle = Bundle::parse(bundle, hint)?;
    let messages = bundle.messages().map(|message| STANDARD.encode(message));
    let signature = STANDARD.encode(&bundle.signature);
    let statement = String::from_utf8(bundle.payload).map_err(|error| bundle::malformed(&error.to_string()))?;
    Ok(Parts { certificates: bundle.certificates, signature, messages, statement })
}
