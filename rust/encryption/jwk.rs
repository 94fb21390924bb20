//! Keys in JSON: JWK and JWK Set of RFC 7517, which users of CryptoTensors have.
//!
//! ```text
//! {"keys": [{"kty": "oct", "kid": "my key", "k": "32 bytes"}, {"kty": "OKP", "crv": "Ed25519", "x": "32 bytes"}]}
//! ```
//!
//! CryptoTensors writes `kty` in lower case, no `crv`, and the other alphabet of base64, with padding. All of them are
//! accepted.

use super::secret::{KEY_BYTES, Key};
use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_PAD_INDIFFERENT, URL_SAFE_PAD_INDIFFERENT};
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::Deserialize;
use zeroize::Zeroizing;

/// Size of a public key of Ed25519 in bytes.
const PUBLIC_KEY_BYTES: usize = 32;
/// Size of the memory for a decoded key in bytes: more than each key has.
const DECODED_BYTES_MAX: usize = 96;
/// Names of Ed25519 as a curve or as an algorithm.
const ED25519_NAMES: [&str; 2] = ["ed25519", "eddsa"];

/// Public key of Ed25519 that a caller trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignerKey([u8; PUBLIC_KEY_BYTES]);

impl SignerKey {
    /// Returns whether the owner of the key has signed a message.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0).verify(message, signature).is_ok()
    }
}

/// Keys of a set.
#[derive(Debug)]
pub struct Keys {
    /// The only secret key.
    pub secret: Key,
    /// Its `kid`, or nothing.
    pub id: String,
    /// Public keys.
    pub signers: Vec<SignerKey>,
}

/// Fields of a key. The text lends the secret ones, which are nowhere copied.
#[derive(Deserialize)]
struct Jwk<'a> {
    kty: &'a str,
    kid: Option<String>,
    alg: Option<&'a str>,
    crv: Option<&'a str>,
    k: Option<&'a str>,
    x: Option<&'a str>,
}

#[derive(Deserialize)]
struct JwkSet<'a> {
    #[serde(borrow)]
    keys: Vec<Jwk<'a>>,
}

/// Parses a JWK or a JWK Set. Keys of other types, and private keys, are ignored.
///
/// # Errors
/// `invalid-argument` if the text is something else, a key has another size, or there is not exactly one secret key.
/// Errors show no part of the text.
pub fn parse(text: &[u8]) -> Result<Keys> {
    let keys = match serde_json::from_slice::<JwkSet<'_>>(text) {
        Ok(JwkSet { keys }) => keys,
        // Errors of `serde_json` may quote a secret.
        Err(error) => match serde_json::from_slice(text) {
            Ok(key) => vec![key],
            Err(_) => {
                let (line, column) = (error.line(), error.column());
                return Err(refused(format!("no JWK and no JWK Set: line {line}, column {column}")));
            }
        },
    };
    let (mut secrets, mut signers) = (Vec::new(), Vec::new());
    for Jwk { kty, kid, alg, crv, k, x } in keys {
        if kty.eq_ignore_ascii_case("oct") {
            let k = k.ok_or_else(|| refused("a key of type \"oct\" has no \"k\"".to_owned()))?;
            let mut memory = Zeroizing::new([0; DECODED_BYTES_MAX]);
            let bytes =
                decode(k, &mut *memory).ok_or_else(|| refused("the \"k\" of a key is not base64".to_owned()))?;
            secrets.push((Key::new(bytes)?, kid.unwrap_or_default()));
        } else if kty.eq_ignore_ascii_case("okp") && is_ed25519(crv) && is_ed25519(alg) {
            let mut memory = [0; DECODED_BYTES_MAX];
            let bytes = x.and_then(|x| decode(x, &mut memory)).and_then(|bytes| bytes.try_into().ok());
            let invalid = || refused(format!("the \"x\" of a public key is not base64 of {PUBLIC_KEY_BYTES} bytes"));
            signers.push(SignerKey(bytes.ok_or_else(invalid)?));
        }
    }
    let count = secrets.len();
    let [(secret, id)] = <[(Key, String); 1]>::try_from(secrets).map_err(|_| {
        refused(format!(
            "a key is in a set with exactly one secret key of type \"oct\" of {KEY_BYTES} bytes, not {count}"
        ))
    })?;
    Ok(Keys { secret, id, signers })
}

/// Returns whether a field that may be missing names Ed25519.
fn is_ed25519(name: Option<&str>) -> bool {
    name.is_none_or(|name| ED25519_NAMES.iter().any(|known| known.eq_ignore_ascii_case(name)))
}

/// Decodes base64 of either alphabet, with or without padding.
fn decode<'a>(text: &str, memory: &'a mut [u8]) -> Option<&'a [u8]> {
    let engine = if text.contains(['-', '_']) { URL_SAFE_PAD_INDIFFERENT } else { STANDARD_PAD_INDIFFERENT };
    let length = engine.decode_slice(text, memory).ok()?;
    memory.get(..length)
}

fn refused(message: String) -> Error {
    Error::new(Kind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 32 bytes whose base64 has the characters in which the alphabets differ.
    const STANDARD: &str = "+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/s=";

    #[test]
    fn both_alphabets_and_both_cases_are_accepted() {
        let url_safe = STANDARD.replace('+', "-").replace('/', "_").replace('=', "");
        for x in [STANDARD, &*url_safe] {
            for (oct, okp) in [
                ("\"kty\":\"oct\",\"alg\":\"aes256gcm\"", "\"kty\":\"okp\",\"alg\":\"ed25519\",\"d\":\"AA==\""),
                ("\"kty\":\"oct\"", "\"kty\":\"OKP\",\"crv\":\"Ed25519\",\"alg\":\"EdDSA\""),
            ] {
                let rsa = r#"{"kty":"RSA","n":"AQ"},{"kty":"OKP","crv":"X25519","x":"AA"}"#;
                let text = format!(r#"{{"keys":[{{{oct},"kid":"é","k":"{x}"}},{rsa},{{{okp},"x":"{x}"}}]}}"#);
                let keys = parse(text.as_bytes()).unwrap();
                assert_eq!(&keys.secret.secret()[..3], [0xfb, 0xfb, 0xfb]);
                assert_eq!((&*keys.id, &keys.signers), ("é", &vec![SignerKey(*keys.secret.secret())]));
            }
        }
        let single = parse(format!(r#" {{"k":"{STANDARD}","kty":"oct"}}"#).as_bytes()).unwrap();
        assert!(single.id.is_empty() && single.signers.is_empty());
    }

    #[test]
    fn refused_keys_are_not_shown() {
        let oct = format!(r#"{{"kty":"oct","k":"{STANDARD}"}}"#);
        let escaped = oct.replace("+/", "+\\/");
        let number = r#"{"kty":"oct","k":71717171}"#.to_owned();
        let two = format!(r#"{{"keys":[{oct},{oct}]}}"#);
        let short = r#"{"kty":"oct","k":"+/v7+w=="}"#.to_owned();
        let signer = format!(r#"{{"keys":[{oct},{{"kty":"OKP","x":"+/v7+w=="}}]}}"#);
        let long = format!(r#"{{"kty":"oct","k":"{}"}}"#, "+/v7".repeat(100));
        let none = r#"{"keys":[]}"#.to_owned();
        for text in [escaped, number, two, short, signer, long, none, oct.replace('=', "*"), "{".to_owned()] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidArgument);
            assert!(!error.to_string().contains("v7") && !error.to_string().contains("71"), "{error}");
        }
    }
}
