"""Functions shared by `fst.torch` and `fst.numpy`, which mirror the modules of safetensors."""

import contextlib
import ctypes
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.framework import find_framework
from fst._checkpoint.safe_open import safe_open
from fst._core import ops
from fst._core.errors import SafetensorError


class safetensors_errors:  # noqa: N801  (a context manager, which takes a third of the time of one from a generator)
    """Raises SafetensorError for ValueError, NotImplementedError and `others`, as safetensors does."""

    def __init__(self, *others: type[Exception]) -> None:
        self._translated: tuple[type[Exception], ...] = (ValueError, NotImplementedError, *others)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, self._translated) and not isinstance(error, SafetensorError):
            raise SafetensorError(str(error)) from error


def library_attribute(module: str, library: str, name: str) -> Any:
    """Returns a name of a module of safetensors, for a module of fst that replaces it."""
    # Python asks for other names with underscores when it imports a module.
    if not name.startswith("__"):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(library), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def load_file(path: str | os.PathLike[str], framework: str, device: str | int, backend: str) -> dict[str, Any]:
    """Loads all tensors of a file."""
    with safetensors_errors(), safe_open(path, framework, device, backend=backend) as file:
        return file.get_tensors()


def load(data: bytes, framework: str) -> dict[str, Any]:
    """Copies all tensors of a file in memory."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be the bytes of a file, not {type(data).__name__}; load_file loads from a path")
    if isinstance(data, memoryview):
        data = data.tobytes()
    # PyTorch warns of a buffer that it may not write to, but the operator only reads it.
    array = (ctypes.c_ubyte * len(data)).from_buffer(data) if isinstance(data, bytearray) else _array_of(data)
    file = torch.frombuffer(array, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    with safetensors_errors():
        tensors = ops.load_bytes(file)
    convert = find_framework(framework).convert
    return {name: convert(tensor) for name, tensor in tensors.items()}


def _array_of(data: bytes) -> Any:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_ubyte * len(data))).contents


def save(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    """Returns the bytes of a file."""
    with safetensors_errors():
        data = ops.serialize(list(tensors.values()), list(tensors), metadata=metadata)
    return ctypes.string_at(data.data_ptr(), data.numel())
