"""Keyless signatures of OpenSSF Model Signing, which the package `sigstore` verifies."""

import os
from pathlib import Path

from fst._core.errors import IntegrityError
from fst._core.source import Source
from fst._core.urls import without_secrets


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
