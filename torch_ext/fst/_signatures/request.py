"""Requests to verify data, as the texts that operators take."""

import json
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from fst._core.arguments import Path, path_of, paths_of
from fst._core.source import Source
from fst._signatures.keyless import statement_of_identity
from fst._signatures.signature import Signature

# Digests of whole files: a manifest, the path of one, or a signature that contains one.
Manifest = Path | Mapping[str, str] | Signature

# Beginnings, in PEM, of the public keys with which the core verifies: uncompressed ones on P-256 and P-384.
_KEYS_OF_CORE = (b"MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE", b"MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAE")


@dataclass(frozen=True)
class Verify:
    """A request to verify data, with what loads do that the digests do not cover.

    Digests of whole files, in manifests and signatures, do not cover loads of some tensors of a file, or of parts of
    tensors. SHA-256 digests of tensors do not cover parts of tensors. See docs/integrity.md.

    Args:
        source: `True` or another value that `verify` of `load_file` takes.
        partial: `"raise"` raises an IntegrityError for a load that the digests do not cover, as `verify=source` does.
            `"allow"` loads the data without verification, and warns with an `IntegrityWarning` that names the tensors.

    Raises:
        ValueError: `partial` is unknown.

    Example:
        >>> fst.save_file({"weight": torch.ones(4, 3)}, "verified.safetensors", digests="sha256")
        >>> digests = fst.Verify(True, partial="allow")
        >>> fst.load_file("verified.safetensors", verify=digests)["weight"].shape
        torch.Size([4, 3])
    """

    source: bool | Manifest
    _: KW_ONLY
    partial: Literal["raise", "allow"] = "raise"

    def __post_init__(self) -> None:
        if self.partial not in ("raise", "allow"):
            raise ValueError(f'partial must be "raise" or "allow", not {self.partial!r}')


# `False`, `True` for the digests in the files, digests of whole files, or one of these in a `Verify`.
VerifyRequest = bool | Manifest | Verify


def verify_of(verify: VerifyRequest) -> str:
    """Returns a request to verify data as the text that operators take."""
    if isinstance(verify, Verify):
        source = verify_of(verify.source)
        return json.dumps({"verify": {"source": source, "partial": verify.partial}}) if source else ""
    if isinstance(verify, bool):
        return "digests" if verify else ""
    if isinstance(verify, Mapping):
        for file, digest in verify.items():
            if not isinstance(file, str) or not isinstance(digest, str):
                raise TypeError(f"verify must map str to str, not {file!r} to {digest!r}")
        return json.dumps(dict(verify))
    if isinstance(verify, Signature):
        return json.dumps({"signature": signature_of(verify)})
    if not isinstance(verify, (str, os.PathLike)):
        raise TypeError(
            "verify must be a bool, a path, a mapping of files to digests, a fst.Signature or a fst.Verify, "
            f"not {type(verify).__name__}"
        )
    path = path_of(verify)
    # Operators take these texts for other requests.
    return os.path.join(".", path) if path in ("", "digests") or path.startswith("{") else path


def signature_of(signature: Signature) -> dict[str, str]:
    """Returns a signature with its key as the values that operators take. Reads the key to know who verifies with it.

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
    from fst._signatures.bundle import verified_statement

    return {"path": path, "statement": verified_statement(path, key, paths_of(signature.certificate_chain))}


def _is_for_core(pem: bytes) -> bool:
    """Returns whether the core verifies with a key, or has the error for a file without one."""
    return b"-----BEGIN PUBLIC KEY-----" not in pem or any(begin in pem for begin in _KEYS_OF_CORE)
