"""Keys of encrypted files in the memory of the core."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fst._core.core_object import CoreObject
from fst._core.errors import methods_translate_errors

# Size of a key of encrypted files in bytes.
KEY_BYTES = 32


@methods_translate_errors
class EncryptionKey(CoreObject):
    """Secret key of encrypted files, which the core overwrites in memory at the end.

    `label` is text that new files show to everybody.
    """

    @classmethod
    def of_bytes(cls, key: bytes, label: str = "") -> "EncryptionKey":
        """Copies the 32 bytes of a key."""
        with _secret(key) as secret:
            return cls("EncryptionKey", secret, label)

    @classmethod
    def of_passphrase(cls, passphrase: bytes, passes: int, memory_bytes: int, label: str) -> "EncryptionKey":
        """Copies a passphrase. New files have the given limits of Argon2id."""
        with _secret(passphrase) as secret:
            return cls("EncryptionKey", secret, label, [passes, memory_bytes])

    @classmethod
    def derived(cls, key: bytes, salt: bytes, passes: int, memory_bytes: int) -> "EncryptionKey":
        """Copies the 32 bytes of a key that `derive` has returned. New files name the salt and the limits."""
        with _secret(key) as secret:
            return cls("EncryptionKey", secret, "", [passes, memory_bytes], _uint8(salt))

    @staticmethod
    def derive(string: bytes, salt: bytes, passes: int, memory_bytes: int) -> bytes:
        """Derives a key from a string with Argon2id, as tensorizer does."""
        with _secret(string) as secret, _secret(bytes(KEY_BYTES)) as key:
            torch.classes.fst.EncryptionKey.derive(secret, [passes, memory_bytes], _uint8(salt), key)
            return key.numpy().tobytes()

    @classmethod
    def of_file(cls, path: str, label: str) -> "EncryptionKey":
        """Reads a key from a local file."""
        return cls.of(torch.classes.fst.EncryptionKey.of_file(path, label))

    def for_save(self) -> "EncryptionKey":
        """Returns the key for the files of one save, which share one salt if the key is from a passphrase."""
        return EncryptionKey.of(self._object.for_save())

    def rotate(self, path: str, key: "EncryptionKey") -> None:
        """Makes the local files that a path leads to open with another key."""
        # Python handles signals between two waits for the lock of a file.
        while not self._object.rotate(path, key._object, 100):
            pass


@contextlib.contextmanager
def _secret(data: bytes) -> Iterator[Tensor]:
    """Copies bytes to a tensor, which is overwritten at the end."""
    tensor = _uint8(data)
    try:
        yield tensor
    finally:
        tensor.zero_()


def _uint8(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
