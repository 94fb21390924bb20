//! X.509 certificates of signers, and the chain from them to a root that the caller trusts.
//!
//! As in the reference, a chain is checked for the time at which the signer's certificate begins to be valid: a
//! signature without a timestamp cannot be dated, and a model outlives its certificate. Revocation is not checked.

use super::bundle::malformed;
use super::key::{self, PublicKey};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use ring::digest::{Algorithm, SHA256, SHA384, SHA512};
use std::time::Duration;
use x509_cert::der::asn1::ObjectIdentifier;
use x509_cert::der::oid::AssociatedOid;
use x509_cert::der::{Decode, DecodePem, Encode};
use x509_cert::ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAltName};
use x509_cert::name::Name;
use x509_cert::spki::AlgorithmIdentifierOwned;

/// Maximum number of certificates in a bundle.
pub(super) const CHAIN_MAX: usize = 16;
/// Maximum number of signatures of certificates that are checked for one bundle.
const CHECKS_MAX: usize = 64;

const CODE_SIGNING: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.3");
/// Hashes of ECDSA.
const ECDSA_HASHES: [(ObjectIdentifier, &Algorithm); 3] = [
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.2"), &SHA256),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.3"), &SHA384),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.4"), &SHA512),
];
/// Critical extensions that are checked or do not restrict a signer.
const KNOWN_EXTENSIONS: [ObjectIdentifier; 4] =
    [BasicConstraints::OID, KeyUsage::OID, ExtendedKeyUsage::OID, SubjectAltName::OID];
/// Extension that restricts the names of certificates below its own, which is not checked.
const NAME_CONSTRAINTS: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.30");

/// Certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    parsed: x509_cert::Certificate,
    der: Vec<u8>,
}

impl Certificate {
    /// Parses a certificate in DER.
    ///
    /// # Errors
    /// `malformed`.
    pub fn parse(der: &[u8]) -> Result<Certificate> {
        let invalid = |error| malformed(&format!("a certificate is not valid: {error}"));
        Ok(Certificate { parsed: x509_cert::Certificate::from_der(der).map_err(invalid)?, der: der.to_vec() })
    }

    /// Parses all certificates of a file in PEM.
    ///
    /// # Errors
    /// `invalid-argument` if the file has no certificate, or one that is not valid. Without the path.
    pub fn parse_pem(pem: &[u8]) -> Result<Vec<Certificate>> {
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        let mut rest = std::str::from_utf8(pem).unwrap_or_default();
        let mut certificates = Vec::new();
        while let Some(block) = key::block(rest, "CERTIFICATE") {
            let parsed = x509_cert::Certificate::from_pem(block)
                .map_err(|error| invalid(format!("certificate {} is not valid: {error}", certificates.len() + 1)))?;
            let der = parsed.to_der().map_err(|error| invalid(format!("a certificate is not valid: {error}")))?;
            certificates.push(Certificate { parsed, der });
            rest = rest.split_once(block).map_or("", |(_, rest)| rest);
        }
        if certificates.is_empty() {
            let message = "the file has no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----";
            return Err(invalid(message.into()));
        }
        Ok(certificates)
    }

    /// Returns the bytes in DER.
    pub(super) fn der(&self) -> &[u8] {
        &self.der
    }

    /// Returns whether the certificate is its own issuer.
    pub(super) fn is_root(&self) -> bool {
        self.subject() == self.parsed.tbs_certificate().issuer()
    }

    /// Returns the key of the certificate.
    ///
    /// # Errors
    /// Those of [`PublicKey::from_der`].
    pub(super) fn key(&self) -> Result<PublicKey> {
        PublicKey::from_der(&encoded(self.parsed.tbs_certificate().subject_public_key_info())?)
    }

    fn subject(&self) -> &Name {
        self.parsed.tbs_certificate().subject()
    }

    /// Returns the first and the last moment at which the certificate is valid, after 1970.
    fn validity(&self) -> (Duration, Duration) {
        let validity = self.parsed.tbs_certificate().validity();
        (validity.not_before.to_unix_duration(), validity.not_after.to_unix_duration())
    }

    /// Returns an extension, if the certificate has it.
    fn extension<'a, T: Decode<'a, Error = x509_cert::der::Error> + AssociatedOid>(
        &'a self,
    ) -> std::result::Result<Option<T>, String> {
        let found = self.parsed.tbs_certificate().get_extension::<T>();
        found.map(|found| found.map(|(_, value)| value)).map_err(|error| format!("has an invalid extension: {error}"))
    }

    /// Checks that a signer may use the certificate.
    fn check_use(&self) -> std::result::Result<(), String> {
        let signs = self.extension::<KeyUsage>()?.is_some_and(|usage| usage.digital_signature());
        let signs_code = self.extension::<ExtendedKeyUsage>()?.is_some_and(|usage| usage.0.contains(&CODE_SIGNING));
        if signs || signs_code { Ok(()) } else { Err("is not one for signing: it lacks the key usage".into()) }
    }

    /// Checks the validity in time and the critical extensions.
    fn check(&self, time: Duration) -> std::result::Result<(), String> {
        let (begin, end) = self.validity();
        if !(begin..=end).contains(&time) {
            return Err("is not valid at the time of the signing certificate".into());
        }
        for extension in self.parsed.tbs_certificate().extensions().into_iter().flatten() {
            let is_known = KNOWN_EXTENSIONS.contains(&extension.extn_id);
            if (extension.critical && !is_known) || extension.extn_id == NAME_CONSTRAINTS {
                return Err(format!("has the extension {}, which fst does not check", extension.extn_id));
            }
        }
        Ok(())
    }

    /// Checks that the certificate may issue others, with `below` certificates of issuers between it and the signer's.
    fn check_issuer(&self, time: Duration, below: usize) -> std::result::Result<(), String> {
        self.check(time)?;
        match self.extension::<BasicConstraints>()? {
            Some(BasicConstraints { ca: true, path_len_constraint })
                if path_len_constraint.is_none_or(|length| to_u64(below) <= u64::from(length)) => {}
            Some(BasicConstraints { ca: true, .. }) => return Err("does not allow a chain of this length".into()),
            _ => return Err("is not one of an issuer".into()),
        }
        match self.extension::<KeyUsage>()? {
            Some(usage) if !usage.key_cert_sign() => Err("may not issue certificates".into()),
            _ => Ok(()),
        }
    }

    /// Checks that the key of `issuer` has signed the certificate.
    fn check_signature(&self, issuer: &Certificate) -> std::result::Result<(), String> {
        let content = self.parsed.tbs_certificate();
        let algorithm = self.parsed.signature_algorithm();
        let other = || "is not signed by the issuer that it names".to_owned();
        let signature = self.parsed.signature().as_bytes().ok_or_else(other)?;
        if algorithm != content.signature() {
            return Err("names two algorithms of its signature".into());
        }
        let text = |error: Error| error.to_string();
        let message = encoded(content).map_err(text)?;
        // `ring` has only some hashes for some curves.
        let hash = ECDSA_HASHES.iter().find(|(oid, _)| algorithm.oid == *oid && algorithm.parameters.is_none());
        if let (Some((_, hash)), Ok(key)) = (hash, issuer.key()) {
            return if key.verifies(hash, &message, signature) { Ok(()) } else { Err(other()) };
        }
        let issuer = issuer.parsed.tbs_certificate().subject_public_key_info();
        let of_signature = identifier(algorithm).map_err(text)?;
        let of_key = identifier(&issuer.algorithm).map_err(text)?;
        let key = issuer.subject_public_key.as_bytes().ok_or_else(other)?;
        let mut fitting = webpki::ALL_VERIFICATION_ALGS
            .iter()
            .filter(|algorithm| {
                algorithm.signature_alg_id().as_ref() == of_signature
                    && algorithm.public_key_alg_id().as_ref() == of_key
            })
            .peekable();
        if fitting.peek().is_none() {
            return Err(format!(
                "is signed with the algorithm {}, which fst does not check with this key",
                algorithm.oid
            ));
        }
        let is_valid = fitting.any(|algorithm| algorithm.verify_signature(key, &message, signature).is_ok());
        if is_valid { Ok(()) } else { Err(other()) }
    }
}

/// Returns the key of the first certificate of a chain, if the chain leads to a root among the trusted certificates.
///
/// # Errors
/// `integrity`, with the reason; `invalid-argument` for a key on another curve.
pub(super) fn signer(chain: &[Certificate], trusted: &[Certificate]) -> Result<PublicKey> {
    let untrusted = |certificate: &Certificate, reason: &str| {
        let subject: String = certificate.subject().to_string().chars().take(200).collect();
        Error::new(Kind::Integrity, format!("the certificate of {subject:?} {reason}"))
    };
    let Some((first, others)) = chain.split_first() else { return Err(malformed("it has no certificate")) };
    let (time, _) = first.validity();
    first.check(time).and_then(|()| first.check_use()).map_err(|reason| untrusted(first, &reason))?;
    let mut search = Search { issuers: others.iter().chain(trusted).collect(), trusted, time, checks: 0, reason: None };
    if trusted.iter().any(|root| root.is_root() && root == first) || search.reaches_root(first, 0)? {
        return first.key();
    }
    let (certificate, reason) = search.reason.unwrap_or((first, "has no issuer among the certificates".into()));
    Err(untrusted(certificate, &reason).note("the chain of the signature does not lead to a trusted root certificate"))
}

/// Search for a path from a certificate to a root.
struct Search<'a> {
    /// Certificates of the bundle and of the caller.
    issuers: Vec<&'a Certificate>,
    /// Certificates of the caller.
    trusted: &'a [Certificate],
    /// Time at which the chain must be valid.
    time: Duration,
    /// Number of signatures that were checked.
    checks: usize,
    /// Certificate that ended a path, and the reason.
    reason: Option<(&'a Certificate, String)>,
}

impl<'a> Search<'a> {
    /// Returns whether a path leads from a certificate, with `below` issuers below it, to a root of the caller.
    fn reaches_root(&mut self, certificate: &'a Certificate, below: usize) -> Result<bool> {
        for issuer in self.issuers.clone() {
            if issuer == certificate || issuer.subject() != certificate.parsed.tbs_certificate().issuer() {
                continue;
            }
            self.checks += 1;
            if self.checks > CHECKS_MAX || below >= CHAIN_MAX {
                return Ok(false);
            }
            if let Err(reason) = certificate.check_signature(issuer) {
                self.reason.get_or_insert((certificate, reason));
                continue;
            }
            if let Err(reason) = issuer.check_issuer(self.time, below) {
                self.reason = Some((issuer, reason));
                continue;
            }
            let is_trusted = issuer.is_root() && self.trusted.contains(issuer);
            if is_trusted || (!issuer.is_root() && self.reaches_root(issuer, below + 1)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn encoded(value: &impl Encode) -> Result<Vec<u8>> {
    value.to_der().map_err(|error| malformed(&format!("a certificate is not valid: {error}")))
}

/// Returns the content of an algorithm's identifier, without the two bytes before it.
fn identifier(algorithm: &AlgorithmIdentifierOwned) -> Result<Vec<u8>> {
    let der = encoded(algorithm)?;
    match der.as_slice() {
        [_, 0..=127, content @ ..] => Ok(content.to_vec()),
        _ => Ok(Vec::new()),
    }
}
