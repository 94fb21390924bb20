"""Open files as bytes, local or remote."""

import torch

from fst._core.core_object import CoreObject
from fst._core.errors import SafetensorError
from fst._core.urls import without_secrets

# Maximum size of a key, certificate or signature in bytes.
CONTENT_BYTES_MAX = 64 << 20


class Source(CoreObject):
    """Open file, local or remote, whose bytes are read as they are. A remote one keeps its version."""

    def __init__(self, path: str) -> None:
        super().__init__("Source", path)
        self._path = without_secrets(path)

    def content(self) -> bytes:
        """Returns all bytes of a key, certificate or signature."""
        length: int = self.length()
        if length > CONTENT_BYTES_MAX:
            raise SafetensorError(f"{self._path}: expected at most {CONTENT_BYTES_MAX} bytes, not {length}")
        content = bytearray(length)
        if content:
            self.read(0, torch.frombuffer(content, dtype=torch.uint8))
        return bytes(content)
