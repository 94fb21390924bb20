"""tensorizer: reads its own format. The files are converted before the measurements."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Loader, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Tensorizer(Loader):
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
        partial = Path(target).with_suffix(".partial")
        serializer = self._tensorizer.TensorSerializer(str(partial))
        try:
            serializer.write_state_dict(_mapped(path))
        except RuntimeError as error:
            raise UnsupportedError(f"cannot write its format, which has 256 KiB for all names: {error}") from error
        serializer.close()
        partial.rename(target)

    def _read(self, paths: Sequence[str], device: str, **options: Any) -> "dict[str, Tensor]":
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with self._tensorizer.TensorDeserializer(path, device=device, **options) as file:
                tensors |= file.items()
        return tensors


def _mapped(path: str) -> "dict[str, Tensor]":
    """Maps the tensors of a safetensors file of the benchmarks, without checks."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = 8 + int.from_bytes(mapping[:8], "little")
    entries = json.loads(mapping[8:data])
    del entries["__metadata__"]
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(mapping, dtype=torch.uint8, offset=data + begin, count=end - begin)
        tensors[name] = flat.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors
