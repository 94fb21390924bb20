//! Signatures of models in the format of OpenSSF Model Signing (`model.sig`).
//!
//! A signature is a Sigstore [`bundle`] with an envelope of DSSE. The envelope holds a [`statement`], which lists the
//! digests of all files, and an ECDSA signature of it. [`verify`] checks the signature with a [`Trust`] of the caller,
//! and returns the [`Manifest`] in the statement. The data are then verified as with any other manifest.
//!
//! Nothing of the statement is read before its signature is verified.

mod bundle;
pub mod certificate;
pub mod key;
pub mod statement;

use crate::digest::manifest::Manifest;
use crate::error::{Error, Kind, Result};
use bundle::{Bundle, Material};
use certificate::Certificate;
use key::{PrivateKey, PublicKey};
use ring::digest::SHA256;
use statement::Statement;

/// Key or root certificates that the caller trusts.
pub enum Trust {
    /// Public key of the signer.
    Key(PublicKey),
    /// Root certificates, and more certificates that may link a signer's certificate to them.
    Certificates(Vec<Certificate>),
}

impl Trust {
    /// Parses a public key in PEM.
    ///
    /// # Errors
    /// Those of [`PublicKey::from_pem`].
    pub fn from_public_key(pem: &[u8]) -> Result<Trust> {
        PublicKey::from_pem(pem).map(Trust::Key)
    }

    /// Trusts the root certificates among these.
    ///
    /// # Errors
    /// `invalid-argument` if none is a root.
    pub fn from_certificates(certificates: Vec<Certificate>) -> Result<Trust> {
        if certificates.iter().any(Certificate::is_root) {
            return Ok(Trust::Certificates(certificates));
        }
        let message = "none of the certificates is a root, which is its own issuer; add the root of the chain";
        Err(Error::new(Kind::InvalidArgument, message))
    }
}

/// Content of a signature that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// Digests of the files.
    pub manifest: Manifest,
    /// Paths that were not signed, relative to the directory of the model. A directory stands for all files in it.
    pub ignored: Vec<String>,
}

/// Verifies the signature of a bundle, and returns what was signed.
///
/// # Errors
/// `integrity` if the signature is not one of the trusted key or of a certificate with a trusted root; `malformed` with
/// the field if the bundle is not valid. Without the path.
pub fn verify(bundle: &[u8], trust: &Trust) -> Result<Signed> {
    let bundle = Bundle::parse(bundle)?;
    let (key, is_chain) = match (trust, &bundle.material) {
        (Trust::Key(key), Material::Key(hint)) => {
            if hint.as_ref().is_some_and(|hint| *hint != key.hint()) {
                return Err(Error::new(Kind::Integrity, "the signature was made with another key"));
            }
            (*key, false)
        }
        (Trust::Certificates(trusted), Material::Chain(chain)) => (certificate::signer(chain, trusted)?, true),
        (Trust::Key(_), Material::Chain(_)) => {
            let message = "the signature has a certificate chain; verify it with the root certificate, not with a key";
            return Err(Error::new(Kind::Integrity, message));
        }
        (Trust::Certificates(_), Material::Key(_)) => {
            let message = "the signature was made with a key without a certificate; verify it with the public key";
            return Err(Error::new(Kind::Integrity, message));
        }
    };
    let payload = &bundle.payload;
    // Version 0.2 of the reference signed another encoding. With certificates, it also used SHA-256 for all keys.
    let older = if is_chain { &SHA256 } else { key.hash() };
    let is_valid = key.verifies(key.hash(), &bundle::encoded(payload), &bundle.signature)
        || key.verifies(older, &bundle::encoded_by_0_2(payload), &bundle.signature);
    if !is_valid {
        return Err(Error::new(Kind::Integrity, "the signature is not valid for its content and the given key"));
    }
    Statement::parse(payload)
}

/// Signer of a model.
pub struct Signer {
    key: PrivateKey,
    /// Certificate of the key and those of its issuers, or empty for a signature with a key alone.
    chain: Vec<Certificate>,
}

impl Signer {
    /// Creates a signer from a private key in PEM and its certificate, if it has one, followed by those of its issuers.
    ///
    /// # Errors
    /// Those of [`PrivateKey::from_pem`]; `invalid-argument` if the certificate is one of another key.
    pub fn new(key: &[u8], chain: Vec<Certificate>) -> Result<Signer> {
        let key = PrivateKey::from_pem(key)?;
        if let Some(certificate) = chain.first()
            && certificate.key()? != key.public_key()
        {
            return Err(Error::new(Kind::InvalidArgument, "the signing certificate belongs to another key"));
        }
        Ok(Signer { key, chain })
    }

    /// Signs a statement, and returns the text of the bundle.
    ///
    /// # Errors
    /// `internal` if the signature cannot be encoded.
    pub fn sign(&self, statement: &Statement) -> Result<String> {
        let payload = statement.to_json()?;
        let signature = self.key.sign(&bundle::encoded(payload.as_bytes()))?;
        let material = match self.chain.as_slice() {
            [] => Material::Key(Some(self.key.public_key().hint())),
            chain => Material::Chain(chain.to_vec()),
        };
        Bundle { material, payload: payload.into_bytes(), signature }.to_json()
    }
}
