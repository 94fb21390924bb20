"""Requests of operators to verify a signature."""

from collections.abc import Sequence

from fst._core.source import Source

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
