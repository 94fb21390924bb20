"""Request to verify data with a signature of OpenSSF Model Signing."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Signature:
    """A signature of a model (`model.sig`), and the key, certificates or identity with which to verify it.

    It goes wherever `verify` takes a manifest. The signature is verified first. Then the data are compared with the
    digests in it while they are loaded. A load verifies the files that it reads. The command `fst verify --signature`
    also reports missing and additional files. See docs/integrity.md.

    Args:
        path: Path or URL of the signature.
        public_key: Path of the signer's public key, in PEM: a key of ECDSA on P-256, P-384 or P-521. A key on P-521
            requires the package `cryptography`.
        certificate_chain: Path or paths of certificates in PEM, for a signature with a certificate. The certificates
            that are their own issuers are trusted. The others may link the signer's certificate to them. It requires
            the package `cryptography`.
        identity: The signer of a keyless signature, such as an e-mail address. It requires the package `sigstore`.
        issuer: The provider that has confirmed the identity, such as "https://accounts.google.com".
        trust_config: Path of Sigstore's client trust configuration, or `None` for the public instance, as far as the
            package `sigstore` knows it. Nothing is downloaded.

    Raises:
        ValueError: Not exactly one of `public_key`, `certificate_chain` and `identity` is given, or an identity has no
            issuer.

    Example:
        >>> signature = fst.Signature("model.sig", public_key="key.pub")
        >>> weights = fst.load_file("model.safetensors", verify=signature)
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    public_key: str | os.PathLike[str] | None = None
    certificate_chain: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    identity: str | None = None
    issuer: str | None = None
    trust_config: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if [self.public_key is not None, bool(self.certificate_chain), self.identity is not None].count(True) != 1:
            raise ValueError("a Signature needs one of public_key, certificate_chain and identity")
        if (self.identity is None) != (self.issuer is None):
            raise ValueError("identity and issuer of a Signature go together")
