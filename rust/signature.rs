//! Signatures of models in the format of OpenSSF Model Signing (`model.sig`).
//!
//! A signature is a Sigstore [`bundle`] with an envelope of DSSE. The envelope holds a [`statement`], which lists the
//! digests of all files, and an ECDSA signature of it. [`verify`] checks the signature with a [`PublicKey`] of the
//! caller, and returns the [`Manifest`] in the statement. The data are then verified as with any other manifest.
//!
//! The Python package verifies signatures with certificates, with keys on P-521 and by identities, and passes the
//! statement (`torch_ext/fst/_core/`). It also signs statements.
//!
//! Nothing of the statement is read before its signature is verified.

mod bundle;
pub mod key;
pub mod statement;

use crate::digest::manifest::Manifest;
use crate::error::{Error, Kind, Result};
use bundle::Bundle;
use key::PublicKey;
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
    let Bundle { hint, payload, signature } = Bundle::parse(bundle)?;
    if hint.is_some_and(|hint| hint != key.hint()) {
        return Err(Error::new(Kind::Integrity, "the signature was made with another key"));
    }
    // Version 0.2 of the reference signed another encoding.
    let is_valid = key.verifies(&bundle::encoded(&payload), &signature)
        || key.verifies(&bundle::encoded_by_0_2(&payload), &signature);
    if !is_valid {
        return Err(Error::new(Kind::Integrity, "the signature is not valid for its content and the given key"));
    }
    Statement::parse(&payload)
}
