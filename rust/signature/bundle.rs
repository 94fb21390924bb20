//! Sigstore bundles (version 0.3, JSON) with an envelope of DSSE.
//!
//! Formats: <https://docs.sigstore.dev/about/bundle/> and
//! <https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md>.

use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;

const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// Bundle whose signature is not verified yet.
pub(super) struct Bundle {
    /// Certificates in DER and base64: the signer's, and its issuers'. Empty for a signature with a key.
    pub(super) certificates: Vec<String>,
    pub(super) payload: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BundleJson {
    media_type: String,
    verification_material: MaterialJson,
    dsse_envelope: EnvelopeJson,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MaterialJson {
    public_key: Option<KeyJson>,
    x509_certificate_chain: Option<ChainJson>,
    /// Certificate of a signature without a key of the signer.
    certificate: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct KeyJson {
    hint: Option<String>,
}

#[derive(Deserialize)]
struct ChainJson {
    certificates: Vec<CertificateJson>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CertificateJson {
    raw_bytes: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EnvelopeJson {
    payload: String,
    payload_type: String,
    signatures: [SignatureJson; 1],
}

#[derive(Deserialize)]
struct SignatureJson {
    sig: String,
}

impl Bundle {
    /// Parses a bundle of a signature that was made with the key of this hint, or with certificates without one. Fails
    /// with `malformed` with the field; `integrity` for a signature of another kind or with another key.
    pub(super) fn parse(json: &[u8], hint: Option<&str>) -> Result<Bundle> {
        let parsed: BundleJson =
            serde_json::from_slice(json).map_err(|error| malformed(&format!("it is no bundle: {error}")))?;
        if parsed.media_type != BUNDLE_TYPE {
            return Err(malformed(&format!("mediaType is {:?}, not {BUNDLE_TYPE:?}", shown(&parsed.media_type))));
        }
        let EnvelopeJson { payload, payload_type, signatures: [SignatureJson { sig }] } = parsed.dsse_envelope;
        if payload_type != PAYLOAD_TYPE {
            return Err(malformed(&format!("payloadType is {:?}, not {PAYLOAD_TYPE:?}", shown(&payload_type))));
        }
        let refused = |message: &str| Err(Error::new(Kind::Integrity, message));
        let MaterialJson { public_key, x509_certificate_chain, certificate } = parsed.verification_material;
        let certificates = match (public_key, x509_certificate_chain, hint) {
            _ if certificate.is_some() => {
                return refused(
                    "the signature is keyless: it has no key, but an identity of Sigstore; verify it with the identity \
                     and the issuer, in Python",
                );
            }
            (_, Some(_), Some(_)) => {
                return refused(
                    "the signature has a certificate chain; verify it with the root certificate, not with a key, in Python",
                );
            }
            (_, Some(chain), None) => chain.certificates.into_iter().map(|each| each.raw_bytes).collect(),
            (Some(_), None, None) => {
                return refused(
                    "the signature has no certificate chain; verify it with the public key or the identity",
                );
            }
            (Some(key), None, Some(hint)) => {
                // Versions before 1.1 of the reference state no hash of the key.
                if key.hint.is_some_and(|stated| !stated.is_empty() && stated != hint) {
                    return refused("the signature was made with another key");
                }
                Vec::new()
            }
            (None, None, _) => {
                return Err(malformed("verificationMaterial has neither publicKey nor x509CertificateChain"));
            }
        };
        Ok(Bundle { certificates, payload: decoded("payload", &payload)?, signature: decoded("sig", &sig)? })
    }

    /// Returns the messages of which one is signed. Version 0.2 of the reference signed the second one.
    pub(super) fn messages(&self) -> [Vec<u8>; 2] {
        [encoded(&self.payload), encoded_by_0_2(&self.payload)]
    }
}

/// Returns the bytes that DSSE signs for a payload.
fn encoded(payload: &[u8]) -> Vec<u8> {
    let header = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len());
    [header.as_bytes(), payload].concat()
}

/// Returns the bytes that version 0.2 of the reference signed for a payload: in place of the payload, the text with
/// which Python prints it.
fn encoded_by_0_2(payload: &[u8]) -> Vec<u8> {
    let mut text = format!("DSSEV1 {} {PAYLOAD_TYPE} {} b", PAYLOAD_TYPE.len(), payload.len()).into_bytes();
    let quote = if payload.contains(&b'\'') && !payload.contains(&b'"') { b'"' } else { b'\'' };
    text.push(quote);
    for &byte in payload {
        match byte {
            b'\t' => text.extend(b"\\t"),
            b'\n' => text.extend(b"\\n"),
            b'\r' => text.extend(b"\\r"),
            b'\\' => text.extend(b"\\\\"),
            _ if byte == quote => text.extend([b'\\', quote]),
            b' '..=b'~' => text.push(byte),
            _ => text.extend(format!("\\x{byte:02x}").bytes()),
        }
    }
    text.push(quote);
    text
}

fn decoded(field: &str, text: &str) -> Result<Vec<u8>> {
    STANDARD.decode(text).map_err(|error| malformed(&format!("{field} is not base64: {error}")))
}

pub(super) fn malformed(message: &str) -> Error {
    Error::new(Kind::Malformed, format!("the signature cannot be read: {message}"))
}

/// Returns the first characters of a text from a stranger.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
