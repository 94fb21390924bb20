"""Open files as bytes, local or remote."""
# Methods of the wrapped object have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import torch
from torch import Tensor

import fst._core.library  # noqa: F401  (registers the class)
from fst._core.errors import SafetensorError, methods_translate_errors
from fst._core.urls import without_secrets

# Maximum size of a key, certificate or signature in bytes.
CONTENT_BYTES_MAX = 64 << 20


@methods_translate_errors
class Source:
    """Open file, local or remote, whose bytes are read as they are. A remote one keeps its version."""

    def __init__(self, path: str) -> None:
        self._object = torch.classes.fst.Source(path)
        self._path = without_secrets(path)

    def length(self) -> int:
        """Returns the length in bytes."""
        return self._object.length()

    def read(self, begin: int, out: Tensor) -> None:
        """Fills a contiguous uint8 tensor on the CPU with the bytes from `begin`."""
        self._object.read(begin, out)

    def content(self) -> bytes:
        """Returns all bytes of a key, certificate or signature."""
        length = self.length()
        if length > CONTENT_BYTES_MAX:
            raise SafetensorError(f"{self._path}: expected at most {CONTENT_BYTES_MAX} bytes, not {length}")
        content = bytearray(length)
        if content:
            self.read(0, torch.frombuffer(content, dtype=torch.uint8))
        return bytes(content)
