"""Keys of encrypted files."""

import secrets
from enum import IntEnum

from fst._core import secret_key
from fst._core.encryption_key import EncryptionKey
from fst._core.secret_key import KEY_BYTES

_SALT_BYTES = 16


class CryptographyError(Exception):
    """Failure of encryption or decryption."""


class EncryptionParams:
    """Key that a serializer encrypts with.

    Args:
        key: 32 secret bytes.

    Attributes:
        key: The secret bytes, for `DecryptionParams.from_key`.

    Raises:
        TypeError: The key is not a bytestring.
        ValueError: The key does not have 32 bytes.
    """

    __slots__ = ("_limits", "_salt", "key")

    class OpsLimit(IntEnum):
        """Presets for the number of passes of `from_string`, as in libsodium."""

        MIN = 1
        INTERACTIVE = 2
        MODERATE = 3
        SENSITIVE = 4

    class MemLimit(IntEnum):
        """Presets for the memory of `from_string` in bytes, as in libsodium."""

        MIN = 8 << 10
        INTERACTIVE = 64 << 20
        MODERATE = 256 << 20
        SENSITIVE = 1 << 30

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes | bytearray | memoryview):
            raise TypeError(
                f"the key must be bytes, not {type(key).__name__}; EncryptionParams.from_string() takes any string"
            )
        self.key = _checked(key)
        self._salt = b""
        self._limits = (0, 0)

    def __repr__(self) -> str:
        return "EncryptionParams(<hidden>)"

    @classmethod
    def random(cls) -> "EncryptionParams":
        """Returns a random key. Whoever loads the file needs its `key`."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_string(
        cls,
        source: str | bytes,
        opslimit: "EncryptionParams.OpsLimit | int | None" = None,
        memlimit: "EncryptionParams.MemLimit | int | None" = None,
        salt: str | bytes | None = None,
        *,
        encoding: str = "utf-8",
    ) -> "EncryptionParams":
        """Derives a key from a string with Argon2id. The file holds the salt and the limits.

        Args:
            source: The secret string.
            opslimit: Number of passes, 3 by default. At least 1, and `opslimit * memlimit` at most 4 GiB.
            memlimit: Memory in bytes, 256 MiB by default. 8 KiB to 1 GiB.
            salt: 16 bytes, which are random by default.
            encoding: Encoding of strings.

        Raises:
            ValueError: The string is empty, or a limit or the salt is out of bounds.
        """
        string = _encoded("source", source, encoding)
        salt = secrets.token_bytes(_SALT_BYTES) if salt is None else _encoded("salt", salt, encoding)
        limits = (
            int(cls.OpsLimit.MODERATE if opslimit is None else opslimit),
            int(cls.MemLimit.MODERATE if memlimit is None else memlimit),
        )
        params = cls(secret_key.EncryptionKey.derive(string, salt, *limits))
        params._salt, params._limits = salt, limits
        return params

    @property
    def salt(self) -> bytes:
        """The salt of a key from a string. Raises ValueError for other keys."""
        if not self._salt:
            raise ValueError("the key was not derived from a string, so it has no salt")
        return self._salt

    def core_key(self) -> secret_key.EncryptionKey:
        """Returns the key for the core."""
        if not self._salt:
            return secret_key.EncryptionKey.of_bytes(self.key)
        return secret_key.EncryptionKey.derived(self.key, self._salt, *self._limits)


class DecryptionParams:
    """Key or string that a deserializer decrypts with: `from_key` or `from_string`.

    Attributes:
        key: The secret bytes, or None.
        source: The secret string as bytes, or None.
    """

    __slots__ = ("key", "source")

    def __init__(self) -> None:
        self.key: bytes | None = None
        self.source: bytes | None = None

    def __repr__(self) -> str:
        return "DecryptionParams(<hidden>)"

    def encryption_key(self) -> EncryptionKey:
        """Returns the key with which fst loads files. Raises ValueError if there is neither a key nor a string."""
        if self.key is not None:
            return EncryptionKey.from_bytes(self.key)
        if self.source is None:
            raise ValueError("DecryptionParams has neither a key nor a string; use from_key() or from_string()")
        return EncryptionKey.from_passphrase(self.source)

    @classmethod
    def from_string(cls, source: str | bytes, *, encoding: str = "utf-8") -> "DecryptionParams":
        """Takes the string of `EncryptionParams.from_string`. Raises ValueError if it is empty."""
        params = cls()
        params.source = _encoded("source", source, encoding)
        return params

    @classmethod
    def from_key(cls, key: bytes) -> "DecryptionParams":
        """Takes the `key` of `EncryptionParams`. Raises ValueError if it does not have 32 bytes."""
        params = cls()
        params.key = _checked(key)
        return params


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, but must have {KEY_BYTES}; for strings there is from_string()")
    return bytes(key)


def _encoded(name: str, text: str | bytes, encoding: str) -> bytes:
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise TypeError(f"the {name} must be a str or bytes, not {type(text).__name__}")
    if not text:
        raise ValueError(f"the {name} must not be empty")
    return text.encode(encoding) if isinstance(text, str) else bytes(text)
