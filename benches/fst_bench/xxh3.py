"""XXH3 by the library of the system: the checksum of new deltas."""

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

from .system_library import system_library


@cache
def _library() -> Any:
    found = system_library("libxxhash.so.0")
    found.XXH3_createState.restype = ctypes.c_void_p
    return found


class Checksum:
    """Checksum of bytes that arrive in parts. The result stays in the library: only the time counts."""

    def __init__(self) -> None:
        self._state = ctypes.c_void_p(_library().XXH3_createState())
        _library().XXH3_128bits_reset(self._state)

    def update(self, part: Tensor) -> None:
        """Adds the bytes of a part."""
        size = ctypes.c_size_t(part.numel())
        if _library().XXH3_128bits_update(self._state, ctypes.c_void_p(part.data_ptr()), size):
            raise RuntimeError("XXH3_128bits_update failed")

    def close(self) -> None:
        _library().XXH3_freeState(self._state)
