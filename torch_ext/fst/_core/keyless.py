"""Keyless signatures, by identities of Sigstore. The package `sigstore` verifies them."""

import os
from pathlib import Path

import torch

from fst._core.classes import Source
from fst._core.errors import IntegrityError


def verified_statement(path: str, identity: str, issuer: str, trust_config: str | os.PathLike[str] | None) -> str:
    """Verifies a keyless signature without the network, and returns the statement in it.

    Raises:
        IntegrityError: The signature is not valid, or belongs to another identity.
        ImportError: The package `sigstore` is not installed.
    """
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle, ClientTrustConfig
        from sigstore.verify import Verifier, policy
    except ImportError as error:
        raise ImportError("keyless signatures require sigstore, which `pip install sigstore` installs") from error
    source = Source(path)
    content = torch.empty(source.length(), dtype=torch.uint8)
    source.read(0, content)
    try:
        if trust_config is None:
            verifier = Verifier.production(offline=True)
        else:
            verifier = Verifier(trusted_root=ClientTrustConfig.from_json(Path(trust_config).read_text()).trusted_root)
        bundle = Bundle.from_json(bytes(content.tolist()))
        _, payload = verifier.verify_dsse(bundle, policy.Identity(identity=identity, issuer=issuer))
    except (Error, ValueError) as error:
        raise IntegrityError(f"{path}: the signature of {identity} cannot be verified: {error}") from error
    return str(payload, "utf-8")
