"""Requests of operators to verify a signature."""

import os
from collections.abc import Sequence
from pathlib import Path

from fst._core.errors import IntegrityError
from fst._core.source import Source
from fst._core.urls import without_secrets

# Beginnings, in PEM, of the public keys with which the core verifies: uncompressed ones on P-256 and P-384.
_KEYS_OF_CORE = (b"MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE", b"MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAE")


def request_of(path: str, key: str | None, certificate_chain: Sequence[str]) -> dict[str, str]:
    """Returns a signature and its key as the values that operators take.

    A signature that the core does not verify is verified here. Operators then get the statement in it.
    """
    if key is not None and _is_for_core(Source(key).content()):
        return {"path": path, "public_key": key}
    # The module requires the package cryptography.
    from fst._core.bundle import verified_statement

    return {"path": path, "statement": verified_statement(path, key, certificate_chain)}


def _is_for_core(pem: bytes) -> bool:
    """Returns whether the core verifies with a key, or has the error for a file without one."""
    return b"-----BEGIN PUBLIC KEY-----" not in pem or any(begin in pem for begin in _KEYS_OF_CORE)


def statement_of_identity(path: str, identity: str, issuer: str, trust_config: str | os.PathLike[str] | None) -> str:
    """Verifies a keyless signature, by an identity of Sigstore, offline, and returns the statement in it."""
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle, ClientTrustConfig
        from sigstore.verify import Verifier, policy
    except ImportError as error:
        raise ImportError("keyless signatures require sigstore, which `pip install sigstore` installs") from error
    content = Source(path).content()
    try:
        if trust_config is None:
            verifier = Verifier.production(offline=True)
        else:
            verifier = Verifier(trusted_root=ClientTrustConfig.from_json(Path(trust_config).read_text()).trusted_root)
        bundle = Bundle.from_json(content)
        _, payload = verifier.verify_dsse(bundle, policy.Identity(identity=identity, issuer=issuer))
    except (Error, ValueError) as error:
        shown = without_secrets(path)
        raise IntegrityError(f"{shown}: the signature of {identity} cannot be verified: {error}") from error
    return str(payload, "utf-8")
