"""tensorizer: reads its own format, into which the files are converted before the measurements."""

import importlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..child import UnsupportedError
from .base import KEY, Loader
from .views import tensor_views


class Tensorizer(Loader):
    """Loads with `options` of `TensorDeserializer`. Encrypted files may be those of `FstTensors`."""

    method = "its own format"
    module = "tensorizer"

    def __init__(self, *, encrypted: bool = False, **options: Any) -> None:
        self._tensorizer = importlib.import_module(self.module)
        self._is_encrypted = encrypted
        self._options = options
        if encrypted:
            options["encryption"] = self._tensorizer.DecryptionParams.from_key(KEY)

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device)

    def cast(self, paths: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        return self._read(paths, device, dtype=dtype)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device, filter_func=frozenset(names).__contains__)

    def convert(self, path: str, target: str) -> None:
        options = {"encryption": self._tensorizer.EncryptionParams(KEY)} if self._is_encrypted else {}
        partial = Path(target).with_suffix(".partial")
        serializer = self._tensorizer.TensorSerializer(str(partial), **options)
        try:
            with open(path, "rb") as file:
                serializer.write_state_dict(tensor_views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))
        except RuntimeError as error:
            raise UnsupportedError(f"cannot write its format, which has 256 KiB for all names: {error}") from error
        serializer.close()
        partial.rename(target)

    def _read(self, paths: Sequence[str], device: str, **options: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with self._tensorizer.TensorDeserializer(path, device=device, **self._options, **options) as file:
                tensors |= {str(name): tensor for name, tensor in file.items()}
        return tensors


class FstTensors(Tensorizer):
    """Loads tensorizer's format with fst."""

    module = "fst.compat.tensorizer"

    def reader(self, paths: Sequence[str], device: str) -> str:
        # The operator that tells takes no key.
        return "pread" if self._is_encrypted else str(torch.ops.fst.reader(list(paths), device))
