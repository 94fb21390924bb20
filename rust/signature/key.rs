//! Public keys of ECDSA on the curves P-256 and P-384.

use crate::digest::Algorithm;
use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, UnparsedPublicKey};

/// First bytes of a key on P-256 in DER, before its uncompressed point.
const P256: &[u8] =
    b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00";
/// First bytes of a key on P-384 in DER, before its uncompressed point.
const P384: &[u8] = b"\x30\x76\x30\x10\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22\x03\x62\x00";
/// Number of characters of a line in PEM.
const PEM_LINE: usize = 64;

/// Public key.
#[derive(Clone, Debug)]
pub struct PublicKey {
    key: UnparsedPublicKey<Vec<u8>>,
    hint: String,
}

impl PublicKey {
    /// Parses a key in PEM. Fails with `invalid-argument` if it is no key of ECDSA on one of the curves. Without the
    /// path.
    pub fn from_pem(pem: &[u8]) -> Result<PublicKey> {
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message);
        let (begin, end) = ("-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----");
        let text = std::str::from_utf8(pem).unwrap_or_default();
        let block = text.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(block, _)| block);
        let block = block.ok_or_else(|| {
            invalid("the file has no public key in PEM, which begins with -----BEGIN PUBLIC KEY-----")
        })?;
        let base64: String = block.split_whitespace().collect();
        let der = STANDARD.decode(&base64).unwrap_or_default();
        let (algorithm, point) = None
            .or_else(|| Some((&ECDSA_P256_SHA256_ASN1, der.strip_prefix(P256)?)))
            .or_else(|| Some((&ECDSA_P384_SHA384_ASN1, der.strip_prefix(P384)?)))
            .ok_or_else(|| {
                let message = "the public key is not an uncompressed key of ECDSA on P-256 or P-384; fst.Signature in \
                               Python, and `fst verify`, also verify with compressed keys and with keys on P-521";
                invalid(message)
            })?;
        // The reference hashes the key in PEM, with lines of this length.
        let lines: Vec<&[u8]> = base64.as_bytes().chunks(PEM_LINE).collect();
        let pem = [begin.as_bytes(), &lines.join(&b'\n'), end.as_bytes(), b""].join(&b'\n');
        let hint = Algorithm::Sha256.digest(&pem).hex();
        Ok(PublicKey { key: UnparsedPublicKey::new(algorithm, point.to_vec()), hint })
    }

    /// Returns whether a signature in DER is one of this message, with the hash that belongs to the curve: SHA-256 or
    /// SHA-384.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        self.key.verify(message, signature).is_ok()
    }

    /// Returns the text with which a bundle refers to this key: the SHA-256 of its PEM in hexadecimal digits.
    pub(super) fn hint(&self) -> &str {
        &self.hint
    }
}
