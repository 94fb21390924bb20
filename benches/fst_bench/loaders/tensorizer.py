"""tensorizer: reads its own format. The files are converted before the measurements."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..child import UnsupportedError
from .base import Loader
from .views import tensor_views


class Tensorizer(Loader):
    """Loads with `options` of `TensorDeserializer`."""

    method = "its own format"

    def __init__(self, **options: Any) -> None:
        import tensorizer

        self._tensorizer = tensorizer
        self._options = options

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device)

    def cast(self, paths: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        return self._read(paths, device, dtype=dtype)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device, filter_func=frozenset(names).__contains__)

    def convert(self, path: str, target: str) -> None:
        self._write(path, target)

    def _write(self, path: str, target: str, **options: Any) -> None:
        partial = Path(target).with_suffix(".partial")
        serializer = self._tensorizer.TensorSerializer(str(partial), **options)
        try:
            serializer.write_state_dict(_mapped(path))
        except RuntimeError as error:
            raise UnsupportedError(f"cannot write its format, which has 256 KiB for all names: {error}") from error
        serializer.close()
        partial.rename(target)

    def _read(self, paths: Sequence[str], device: str, **options: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with self._tensorizer.TensorDeserializer(path, device=device, **self._options, **options) as file:
                tensors |= file.items()
        return tensors


def _mapped(path: str) -> dict[str, Tensor]:
    """Maps the tensors of a safetensors file of the benchmarks."""
    with open(path, "rb") as file:
        return tensor_views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
