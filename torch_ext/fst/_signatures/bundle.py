"""New signatures of OpenSSF Model Signing, and those with certificates or with keys that the core does not know.

The package `cryptography` signs and verifies. The core reads the bundles of signatures to verify.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

from fst._core import ops
from fst._core.errors import IntegrityError, SafetensorError
from fst._core.source import Source
from fst._core.urls import without_secrets

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
        load_pem_public_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID
    from cryptography.x509.verification import (
        Criticality,
        ExtensionPolicy,
        Policy,
        PolicyBuilder,
        Store,
        VerificationError,
    )
except ImportError as error:
    raise ImportError(
        "new signatures, signatures with certificates, and public keys other than uncompressed ones on P-256 and P-384 "
        "require cryptography 45 or later, which `pip install cryptography` installs"
    ) from error

_Chain: TypeAlias = list[x509.Certificate]

_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_NO_KEY = "not a key of ECDSA on P-256, P-384 or P-521, as model signatures have it"
# Hash of each curve.
_HASHES = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512()}
# Exceptions of `base64` and `cryptography` for contents that are not valid.
_INVALID = (
    TypeError,
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def verified_statement(path: str, public_key: str | None, certificate_chain: Sequence[str]) -> str:
    """Verifies a signature with a public key, or with certificates without one, and returns the statement in it."""
    key = None if public_key is None else _read_public_key(public_key)
    trusted = _read_certificates(certificate_chain)
    if key is None and not any(map(_is_root, trusted)):
        raise ValueError("none of the certificates is a root, which is its own issuer; add the root of the chain")
    parts = ops.call("signature_parts", [path, None if key is None else _hint(key)])
    shown = without_secrets(path)
    try:
        chain = [x509.load_der_x509_certificate(b64decode(each)) for each in parts["certificates"]]
        signer = _verified_signer(chain, trusted) if key is None else key
    except IntegrityError as error:
        raise IntegrityError(f"{shown}: {error}") from error
    except _INVALID as error:
        raise SafetensorError(f"{shown}: the signature cannot be read: {error!r}") from error
    signature, message, old_message = map(b64decode, [parts["signature"], *parts["messages"]])
    # With certificates, version 0.2 of the reference used SHA-256 for all keys.
    old_hash = hashes.SHA256() if key is None else _hash(key)
    signed = ((message, _hash(signer)), (old_message, old_hash))
    if not any(_verifies(signer, signature, each, algorithm) for each, algorithm in signed):
        raise IntegrityError(f"{shown}: the signature is not valid for its content and the given key")
    return str(parts["statement"])


def _verified_signer(chain: _Chain, trusted: _Chain) -> EllipticCurvePublicKey:
    """Returns the key of the first certificate of a chain, if the chain leads to a root among the trusted certificates.

    As in the reference, the chain is checked for the time at which the signer's certificate begins to be valid: a
    signature without a timestamp cannot be dated, and a model outlives its certificate.
    """
    if not chain:
        raise ValueError("the certificate chain is empty")
    signer = chain[0]
    reason = None
    if not any(_is_for_signing(extension.value) for extension in signer.extensions):
        reason = "is not one for signing: it lacks the key usage"
    else:
        roots = [certificate for certificate in trusted if _is_root(certificate)]
        issuers = [certificate for certificate in chain[1:] + trusted if not _is_root(certificate)]
        issuer_policy = (
            ExtensionPolicy.permit_all()
            .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
            .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, _check_issuer)
        )
        builder = PolicyBuilder().store(Store(roots)).time(signer.not_valid_before_utc)
        builder = builder.extension_policies(ca_policy=issuer_policy, ee_policy=ExtensionPolicy.permit_all())
        try:
            builder.build_client_verifier().verify(signer, issuers)
        except VerificationError as error:
            reason = f"does not lead to a trusted root certificate: {error}"
    if reason is not None:
        raise IntegrityError(f'the certificate of "{signer.subject.rfc4514_string()[:200]}" {reason}')
    return _ecdsa(signer.public_key())


def _is_root(certificate: x509.Certificate) -> bool:
    return certificate.issuer == certificate.subject


def _is_for_signing(extension: x509.ExtensionType) -> bool:
    if isinstance(extension, x509.ExtendedKeyUsage):
        return ExtendedKeyUsageOID.CODE_SIGNING in extension
    return isinstance(extension, x509.KeyUsage) and extension.digital_signature


def _check_issuer(_policy: Policy, _issuer: x509.Certificate, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the key usage of an issuer does not allow to issue certificates")


class Signer:
    """Private key that signs statements.

    Args:
        private_key: Path of the key in PEM, not encrypted.
        certificate_chain: Paths of the certificates of the key and of its issuers, or nothing for a signature with a
            key alone.

    Raises:
        ValueError: The file has no private key of ECDSA, or the first certificate belongs to another key.
    """

    def __init__(self, private_key: str, certificate_chain: Sequence[str]) -> None:
        pem = Source(private_key).content()
        shown = without_secrets(private_key)
        if b"PRIVATE KEY-----" not in pem:
            raise ValueError(
                f"{shown}: the file has no private key in PEM, which begins with -----BEGIN PRIVATE KEY-----"
            )
        # Messages of the package might show what is in the file.
        try:
            key = load_pem_private_key(pem, None)
        except TypeError:
            message = "the private key is encrypted; decrypt it with `openssl pkey -in KEY -out DECRYPTED`"
            raise ValueError(f"{shown}: {message}") from None
        except _INVALID:
            key = None
        if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
            raise ValueError(f"{shown}: the private key is {_NO_KEY}")
        self._key = key
        self._chain = _read_certificates(certificate_chain)
        if self._chain and self._chain[0].public_key() != key.public_key():
            raise ValueError(f"{shown}: the signing certificate belongs to another key")

    def sign(self, statement: str) -> str:
        """Signs a statement, and returns the text of the bundle."""
        key, payload = self._key.public_key(), statement.encode()
        raw = [{"rawBytes": _base64(certificate.public_bytes(Encoding.DER))} for certificate in self._chain]
        material = {"x509CertificateChain": {"certificates": raw}} if raw else {"publicKey": {"hint": _hint(key)}}
        signature = self._key.sign(_encoded(payload), ECDSA(_hash(key)))
        envelope = {
            "payload": _base64(payload),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": _base64(signature), "keyid": ""}],
        }
        bundle = {
            "mediaType": _BUNDLE_TYPE,
            "verificationMaterial": {**material, "tlogEntries": []},
            "dsseEnvelope": envelope,
        }
        return json.dumps(bundle)


def _ecdsa(key: object) -> EllipticCurvePublicKey:
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _HASHES:
        return key
    raise ValueError(f"the key is {_NO_KEY}")


def _read_public_key(path: str) -> EllipticCurvePublicKey:
    pem = Source(path).content()
    try:
        return _ecdsa(load_pem_public_key(pem))
    except _INVALID:
        raise ValueError(f"{without_secrets(path)}: the public key is {_NO_KEY}") from None


def _read_certificates(paths: Sequence[str]) -> _Chain:
    certificates = []
    for path in paths:
        pem = Source(path).content()
        try:
            certificates += x509.load_pem_x509_certificates(pem)
        except _INVALID as error:
            message = "the file has no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----"
            raise ValueError(f"{without_secrets(path)}: {message}: {error}") from error
    return certificates


def _hash(key: EllipticCurvePublicKey) -> hashes.HashAlgorithm:
    return _HASHES[key.curve.name]


def _hint(key: EllipticCurvePublicKey) -> str:
    """Returns the text with which a bundle refers to a key."""
    return sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _verifies(key: EllipticCurvePublicKey, signature: bytes, message: bytes, algorithm: hashes.HashAlgorithm) -> bool:
    try:
        key.verify(signature, message, ECDSA(algorithm))
    except InvalidSignature:
        return False
    return True


def _encoded(payload: bytes) -> bytes:
    """Returns the bytes that DSSE signs for a payload."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _base64(content: bytes) -> str:
    return b64encode(content).decode()
