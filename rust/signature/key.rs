//! Keys of ECDSA on the curves P-256, P-384 and P-521.

use crate::error::{Error, Kind, Result};
use p256::ecdsa::signature::Signer;
use p256::ecdsa::signature::hazmat::PrehashVerifier;
use p256::pkcs8::{DecodePublicKey, EncodePublicKey, LineEnding};
use ring::digest::{Algorithm, SHA256, SHA384, SHA512, digest};

/// Public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublicKey {
    /// Key on P-256.
    P256(p256::ecdsa::VerifyingKey),
    /// Key on P-384.
    P384(p384::ecdsa::VerifyingKey),
    /// Key on P-521.
    P521(p521::ecdsa::VerifyingKey),
}

impl PublicKey {
    /// Parses a key in PEM.
    ///
    /// # Errors
    /// `invalid-argument` if it is no key of ECDSA on one of the curves. Without the path.
    pub fn from_pem(pem: &[u8]) -> Result<PublicKey> {
        let text = std::str::from_utf8(pem).unwrap_or_default();
        let block = block(text, "PUBLIC KEY").ok_or_else(|| {
            let message = "the file has no public key in PEM, which begins with -----BEGIN PUBLIC KEY-----";
            Error::new(Kind::InvalidArgument, message)
        })?;
        None.or_else(|| DecodePublicKey::from_public_key_pem(block).map(PublicKey::P256).ok())
            .or_else(|| DecodePublicKey::from_public_key_pem(block).map(PublicKey::P384).ok())
            .or_else(|| DecodePublicKey::from_public_key_pem(block).map(PublicKey::P521).ok())
            .ok_or_else(|| unsupported("public key"))
    }

    /// Parses the key of a certificate.
    ///
    /// # Errors
    /// `invalid-argument` if it is no key of ECDSA on one of the curves.
    pub(super) fn from_der(der: &[u8]) -> Result<PublicKey> {
        None.or_else(|| DecodePublicKey::from_public_key_der(der).map(PublicKey::P256).ok())
            .or_else(|| DecodePublicKey::from_public_key_der(der).map(PublicKey::P384).ok())
            .or_else(|| DecodePublicKey::from_public_key_der(der).map(PublicKey::P521).ok())
            .ok_or_else(|| unsupported("key of the signing certificate"))
    }

    /// Returns the hash that belongs to the curve: SHA-256, SHA-384 or SHA-512.
    pub(super) fn hash(&self) -> &'static Algorithm {
        match self {
            PublicKey::P256(_) => &SHA256,
            PublicKey::P384(_) => &SHA384,
            PublicKey::P521(_) => &SHA512,
        }
    }

    /// Returns whether a signature in DER is one of the hash of this message.
    pub(super) fn verifies(&self, hash: &'static Algorithm, message: &[u8], signature: &[u8]) -> bool {
        let hash = digest(hash, message);
        macro_rules! verify {
            ($key:expr, $curve:ident) => {
                $curve::ecdsa::DerSignature::from_bytes(signature)
                    .is_ok_and(|signature| $key.verify_prehash(hash.as_ref(), &signature).is_ok())
            };
        }
        match self {
            PublicKey::P256(key) => verify!(key, p256),
            PublicKey::P384(key) => verify!(key, p384),
            PublicKey::P521(key) => verify!(key, p521),
        }
    }

    /// Returns the text with which a bundle refers to this key: the SHA-256 of its PEM in hexadecimal digits.
    pub fn hint(&self) -> String {
        let pem = match self {
            PublicKey::P256(key) => key.to_public_key_pem(LineEnding::LF),
            PublicKey::P384(key) => key.to_public_key_pem(LineEnding::LF),
            PublicKey::P521(key) => key.to_public_key_pem(LineEnding::LF),
        };
        let hash = digest(&SHA256, pem.unwrap_or_default().as_bytes());
        hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Private key. Its memory is overwritten when it is dropped, and it cannot be printed.
pub struct PrivateKey(Secret);

enum Secret {
    P256(p256::ecdsa::SigningKey),
    P384(p384::ecdsa::SigningKey),
    P521(p521::ecdsa::SigningKey),
}

impl PrivateKey {
    /// Parses a key in PEM: PKCS #8 (`PRIVATE KEY`), or SEC 1 (`EC PRIVATE KEY`), as `openssl ecparam` writes it.
    ///
    /// # Errors
    /// `invalid-argument` if it is no key of ECDSA on one of the curves. Without the path and any part of the key.
    pub fn from_pem(pem: &[u8]) -> Result<PrivateKey> {
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message);
        let text = std::str::from_utf8(pem).unwrap_or_default();
        if text.contains("ENCRYPTED") {
            let message = "the private key is encrypted; decrypt it with `openssl pkey -in KEY -out DECRYPTED`";
            return Err(invalid(message));
        }
        let found = block(text, "PRIVATE KEY").or_else(|| block(text, "EC PRIVATE KEY"));
        let block = found.ok_or_else(|| {
            invalid("the file has no private key in PEM, which begins with -----BEGIN PRIVATE KEY-----")
        })?;
        let secret = None
            .or_else(|| p256::SecretKey::from_pem(block).map(|key| Secret::P256(key.into())).ok())
            .or_else(|| p384::SecretKey::from_pem(block).map(|key| Secret::P384(key.into())).ok())
            .or_else(|| p521::SecretKey::from_pem(block).map(|key| Secret::P521(key.into())).ok());
        secret.map(PrivateKey).ok_or_else(|| unsupported("private key"))
    }

    /// Returns the public key.
    pub fn public_key(&self) -> PublicKey {
        match &self.0 {
            Secret::P256(key) => PublicKey::P256(*key.verifying_key()),
            Secret::P384(key) => PublicKey::P384(*key.verifying_key()),
            Secret::P521(key) => PublicKey::P521(*key.verifying_key()),
        }
    }

    /// Returns the signature of a message in DER. The nonce is that of RFC 6979, which needs no random numbers.
    pub(super) fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        macro_rules! sign {
            ($key:expr, $curve:ident) => {{
                let signature: std::result::Result<$curve::ecdsa::DerSignature, _> = $key.try_sign(message);
                signature.map(|signature| signature.as_bytes().to_vec())
            }};
        }
        let signature = match &self.0 {
            Secret::P256(key) => sign!(key, p256),
            Secret::P384(key) => sign!(key, p384),
            Secret::P521(key) => sign!(key, p521),
        };
        signature.map_err(|_| Error::new(Kind::Internal, "the key cannot sign"))
    }
}

/// Returns the block of a label, without the text around it.
pub(super) fn block<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    let (first, last) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let rest = text.get(text.find(&first)?..)?;
    rest.get(..rest.find(&last)? + last.len())
}

fn unsupported(what: &str) -> Error {
    let message = format!("the {what} is not a key of ECDSA on P-256, P-384 or P-521, as model signatures have it");
    Error::new(Kind::InvalidArgument, message)
}
