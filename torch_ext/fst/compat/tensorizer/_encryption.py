"""What stands for encryption until there is any."""

from typing import Any, NoReturn


class CryptographyError(Exception):
    """Tensors cannot be encrypted or decrypted."""


def refuse_encryption() -> NoReturn:
    """Says what to do meanwhile."""
    raise NotImplementedError(
        "fst does not encrypt or decrypt yet: leave `encryption` out and keep the file on an encrypted disk, "
        "or use tensorizer itself for this file"
    )


class _Params:
    """Each way to make one is refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_encryption()

    @classmethod
    def from_string(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        refuse_encryption()


class EncryptionParams(_Params):
    """A key to encrypt with. There is no encryption yet, so making one is a NotImplementedError."""

    @classmethod
    def random(cls) -> NoReturn:
        """Refused."""
        refuse_encryption()


class DecryptionParams(_Params):
    """A key to decrypt with. There is no decryption yet, so making one is a NotImplementedError."""

    @classmethod
    def from_key(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        refuse_encryption()
