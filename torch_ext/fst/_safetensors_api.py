"""What `fst.torch` and `fst.numpy` share to be as the modules of safetensors are."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from fst._checkpoint.safe_open import safe_open
from fst._core.errors import SafetensorError


@contextlib.contextmanager
def safetensors_errors(*others: type[Exception]) -> Iterator[None]:
    """Raises what safetensors has one exception for as that one; `others` are more of these."""
    kinds: tuple[type[Exception], ...] = (ValueError, NotImplementedError, *others)
    try:
        yield
    except SafetensorError:
        raise
    except kinds as error:
        raise SafetensorError(str(error)) from error


def load_file(path: str | os.PathLike[str], framework: str, device: str | int, backend: str) -> dict[str, Any]:
    """All tensors of a file."""
    with safetensors_errors(), safe_open(path, framework, device, backend=backend) as file:
        return file.get_tensors()


def load(data: bytes, framework: str) -> dict[str, Any]:
    """All tensors of a file that is in memory.

    The bytes become a file that has no name and lives in memory too, so that the one loader there is checks and loads
    it. What it returns are private views of that file, which goes when the last of them does.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, not {type(data).__name__}")
    descriptor = os.memfd_create("safetensors")
    path = f"/proc/self/fd/{descriptor}"
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        try:
            return load_file(path, framework, "cpu", "mmap")
        except SafetensorError as error:
            raise SafetensorError(str(error).replace(path, "data")) from None
