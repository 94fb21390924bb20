//! Sigstore bundles (version 0.3, JSON) with an envelope of DSSE.
//!
//! Formats: <https://docs.sigstore.dev/about/bundle/> and
//! <https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md>.

use super::certificate::{CHAIN_MAX, Certificate};
use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// Type of a bundle.
const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// Type of the payload: a statement of in-toto.
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// Bundle whose signature is not verified yet.
pub(super) struct Bundle {
    pub(super) material: Material,
    pub(super) payload: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

/// Statement of the bundle about its signer.
pub(super) enum Material {
    /// Hash of the public key. Versions before 1.1 of the reference have none.
    Key(Option<String>),
    /// Certificate of the signer, and those of its issuers.
    Chain(Vec<Certificate>),
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct BundleJson {
    media_type: String,
    verification_material: MaterialJson,
    dsse_envelope: EnvelopeJson,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct MaterialJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    public_key: Option<KeyJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x509_certificate_chain: Option<ChainJson>,
    /// Certificate of a signature without a key of the signer.
    #[serde(skip_serializing)]
    certificate: Option<IgnoredAny>,
    /// Entries of a transparency log, which signatures with a key do not have.
    #[serde(default, skip_deserializing)]
    tlog_entries: [u8; 0],
}

#[derive(Deserialize, Serialize)]
struct KeyJson {
    hint: Option<String>,
}

#[derive(Deserialize, Serialize)]
struct ChainJson {
    certificates: Vec<CertificateJson>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct CertificateJson {
    raw_bytes: String,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct EnvelopeJson {
    payload: String,
    payload_type: String,
    signatures: Vec<SignatureJson>,
}

#[derive(Deserialize, Serialize)]
struct SignatureJson {
    sig: String,
    #[serde(default, skip_deserializing)]
    keyid: &'static str,
}

impl Bundle {
    /// Parses a bundle.
    ///
    /// # Errors
    /// `malformed` with the field; `integrity` for a signature of a kind that fst does not verify.
    pub(super) fn parse(json: &[u8]) -> Result<Bundle> {
        let parsed: BundleJson =
            serde_json::from_slice(json).map_err(|error| malformed(&format!("it is no bundle: {error}")))?;
        if parsed.media_type != BUNDLE_TYPE {
            return Err(malformed(&format!("mediaType is {:?}, not {BUNDLE_TYPE:?}", shown(&parsed.media_type))));
        }
        let envelope = parsed.dsse_envelope;
        if envelope.payload_type != PAYLOAD_TYPE {
            let found = shown(&envelope.payload_type);
            return Err(malformed(&format!("payloadType is {found:?}, not {PAYLOAD_TYPE:?}")));
        }
        let [signature] = envelope.signatures.as_slice() else {
            return Err(malformed(&format!("signatures has {} entries, not one", envelope.signatures.len())));
        };
        let material = match parsed.verification_material {
            MaterialJson { certificate: Some(_), .. } => {
                let message = "the signature is keyless: it has no key, but an identity of Sigstore; verify it with the \
                               identity and the issuer, in Python";
                return Err(Error::new(Kind::Integrity, message));
            }
            MaterialJson { public_key: Some(key), x509_certificate_chain: None, .. } => {
                Material::Key(key.hint.filter(|hint| !hint.is_empty()))
            }
            MaterialJson { public_key: None, x509_certificate_chain: Some(chain), .. } => {
                let count = chain.certificates.len();
                if !(1..=CHAIN_MAX).contains(&count) {
                    let message = format!("x509CertificateChain has {count} certificates, not 1 to {CHAIN_MAX}");
                    return Err(malformed(&message));
                }
                let parse = |json: &CertificateJson| Certificate::parse(&decoded("rawBytes", &json.raw_bytes)?);
                Material::Chain(chain.certificates.iter().map(parse).collect::<Result<_>>()?)
            }
            _ => return Err(malformed("verificationMaterial has neither publicKey nor x509CertificateChain")),
        };
        let (payload, signature) = (decoded("payload", &envelope.payload)?, decoded("sig", &signature.sig)?);
        Ok(Bundle { material, payload, signature })
    }

    /// Returns the text of the bundle.
    ///
    /// # Errors
    /// `internal` if the text cannot be written.
    pub(super) fn to_json(&self) -> Result<String> {
        let (public_key, chain) = match &self.material {
            Material::Key(hint) => (Some(KeyJson { hint: hint.clone() }), None),
            Material::Chain(chain) => {
                let raw = |certificate: &Certificate| CertificateJson { raw_bytes: STANDARD.encode(certificate.der()) };
                (None, Some(ChainJson { certificates: chain.iter().map(raw).collect() }))
            }
        };
        let json = BundleJson {
            media_type: BUNDLE_TYPE.into(),
            verification_material: MaterialJson {
                public_key,
                x509_certificate_chain: chain,
                certificate: None,
                tlog_entries: [],
            },
            dsse_envelope: EnvelopeJson {
                payload: STANDARD.encode(&self.payload),
                payload_type: PAYLOAD_TYPE.into(),
                signatures: vec![SignatureJson { sig: STANDARD.encode(&self.signature), keyid: "" }],
            },
        };
        serde_json::to_string(&json).map_err(|error| Error::new(Kind::Internal, error.to_string()))
    }
}

/// Returns the bytes that DSSE signs for a payload.
pub(super) fn encoded(payload: &[u8]) -> Vec<u8> {
    let header = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len());
    [header.as_bytes(), payload].concat()
}

/// Returns the bytes that version 0.2 of the reference signed for a payload: in place of the payload, the text with
/// which Python prints it.
pub(super) fn encoded_by_0_2(payload: &[u8]) -> Vec<u8> {
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

/// Returns the error of a signature that is not valid.
pub(super) fn malformed(message: &str) -> Error {
    Error::new(Kind::Malformed, format!("the signature cannot be read: {message}"))
}

/// Returns the first characters of a text from a stranger.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
