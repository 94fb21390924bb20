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
    pub(super) signer: Signer,
    pub(super) payload: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

/// What a bundle says about the key that made its signature.
pub(super) enum Signer {
    /// Hash of the public key. Versions before 1.1 of the reference have none.
    Key(Option<String>),
    /// Certificates in DER and base64: that of the signer, and those of its issuers.
    Certificates(Vec<String>),
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
    /// Parses a bundle. Fails with `malformed` with the field; `integrity` for a keyless signature.
    pub(super) fn parse(json: &[u8]) -> Result<Bundle> {
        let parsed: BundleJson =
            serde_json::from_slice(json).map_err(|error| malformed(&format!("it is no bundle: {error}")))?;
        if parsed.media_type != BUNDLE_TYPE {
            return Err(malformed(&format!("mediaType is {:?}, not {BUNDLE_TYPE:?}", shown(&parsed.media_type))));
        }
        let EnvelopeJson { payload, payload_type, signatures: [SignatureJson { sig }] } = parsed.dsse_envelope;
        if payload_type != PAYLOAD_TYPE {
            return Err(malformed(&format!("payloadType is {:?}, not {PAYLOAD_TYPE:?}", shown(&payload_type))));
        }
        let signer = match parsed.verification_material {
            MaterialJson { certificate: Some(_), .. } => {
                let message = "the signature is keyless: it has no key, but an identity of Sigstore; verify it with the \
                               identity and the issuer, in Python";
                return Err(Error::new(Kind::Integrity, message));
            }
            MaterialJson { x509_certificate_chain: Some(chain), .. } => {
                Signer::Certificates(chain.certificates.into_iter().map(|certificate| certificate.raw_bytes).collect())
            }
            MaterialJson { public_key: Some(key), .. } => Signer::Key(key.hint.filter(|hint| !hint.is_empty())),
            MaterialJson { .. } => {
                return Err(malformed("verificationMaterial has neither publicKey nor x509CertificateChain"));
            }
        };
        Ok(Bundle { signer, payload: decoded("payload", &payload)?, signature: decoded("sig", &sig)? })
    }

    /// Checks that the signature was made with a key with this hint.
    pub(super) fn check_key(&self, hint: &str) -> Result<()> {
        let message = match &self.signer {
            Signer::Key(stated) if stated.as_ref().is_none_or(|stated| stated == hint) => return Ok(()),
            Signer::Key(_) => "the signature was made with another key",
            Signer::Certificates(_) => {
                "the signature has a certificate chain; verify it with the root certificate, not with a key, in Python"
            }
        };
        Err(Error::new(Kind::Integrity, message))
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
