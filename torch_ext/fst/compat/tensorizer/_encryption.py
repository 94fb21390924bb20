"""Names of tensorizer's encryption, which fst does not support yet."""

from typing import Any, NoReturn


class CryptographyError(Exception):
    """Failure of encryption or decryption. fst never raises it."""


def refuse_encryption() -> NoReturn:
    """Raises NotImplementedError with the alternatives."""
    raise NotImplementedError(
        "fst does not encrypt or decrypt yet: leave `encryption` out and keep the file on an encrypted disk, "
        "or use tensorizer itself for this file"
    )


class _Params:
    """Base class whose constructors raise NotImplementedError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_encryption()

    @classmethod
    def from_string(cls, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError."""
        refuse_encryption()


class EncryptionParams(_Params):
    """Encryption key. Not supported yet: the constructors raise NotImplementedError."""

    @classmethod
    def random(cls) -> NoReturn:
        """Raises NotImplementedError."""
        refuse_encryption()


class DecryptionParams(_Params):
    """Decryption key. Not supported yet: the constructors raise NotImplementedError."""

    @classmethod
    def from_key(cls, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError."""
        refuse_encryption()
