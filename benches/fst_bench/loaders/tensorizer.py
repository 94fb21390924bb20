"""tensorizer: reads its own format. The files are converted before the measurements."""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .base import Loader, UnsupportedError
from .views import tensor_views

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Tensorizer(Loader):
    readers = 1  # the default of the library
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        import tensorizer

        self._tensorizer = tensorizer

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        return self._read(paths, device)

    def cast(self, paths: Sequence[str], dtype: "torch.dtype", device: str) -> "dict[str, Tensor]":
        return self._read(paths, device, dtype=dtype)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> "dict[str, Tensor]":
        return self._read(paths, device, filter_func=frozenset(names).__contains__)

    def reader(self, paths: Sequence[str], device: str) -> str:
        return "its own format"

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

    def _read(self, paths: Sequence[str], device: str, **options: Any) -> "dict[str, Tensor]":
        tensors: dict[str, Tensor] = {}
        options = {"device": device, "num_readers": self.readers, **self.options, **options}
        for path in paths:
            with self._tensorizer.TensorDeserializer(path, **options) as file:
                tensors |= file.items()
        return tensors


def _mapped(path: str) -> "dict[str, Tensor]":
    """Maps the tensors of a safetensors file of the benchmarks."""
    with open(path, "rb") as file:
        return tensor_views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class TensorizerParallel(Tensorizer):
    """tensorizer with 8 readers, each with a connection of its own."""

    readers = 8
