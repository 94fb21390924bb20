"""Requests of operators to verify a signature."""

from fst._core.arguments import path_of, paths_of
from fst._core.classes import Source
from fst._core.keyless import statement_of_identity
from fst._core.signature import Signature

# Beginnings, in PEM, of the public keys with which the core verifies: uncompressed ones on P-256 and P-384.
_KEYS_OF_CORE = (b"MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE", b"MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAE")


def signature_of(signature: Signature) -> dict[str, str]:
    """Returns a signature and its key as the values that operators take.

    A signature that the core does not verify is verified here. Operators then get the statement in it.
    """
    path = path_of(signature.path)
    if signature.identity is not None and signature.issuer is not None:
        statement = statement_of_identity(path, signature.identity, signature.issuer, signature.trust_config)
        return {"path": path, "statement": statement}
    key = None if signature.public_key is None else path_of(signature.public_key)
    if key is not None and _is_for_core(Source(key).content()):
        return {"path": path, "public_key": key}
    # The module requires the package cryptography.
    from fst._core.bundle import verified_statement

    return {"path": path, "statement": verified_statement(path, key, paths_of(signature.certificate_chain))}


def _is_for_core(pem: bytes) -> bool:
    """Returns whether the core verifies with a key, or has the error for a file without one."""
    return b"-----BEGIN PUBLIC KEY-----" not in pem or any(begin in pem for begin in _KEYS_OF_CORE)
