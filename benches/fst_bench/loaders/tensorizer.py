"""tensorizer: reads its own format, into which the files are converted before the measurements."""

import importlib
import mmap
from pathlib import Path
from typing import Any

import torch

from ..unsupported import UnsupportedError
from .base import KEY, Job, Loader, Tensors
from .views import tensor_views


class Tensorizer(Loader):
    """Loads with `options` of `TensorDeserializer`. Encrypted files may come from `FstTensors`."""

    method = "its own format"
    module = "tensorizer"

    def __init__(self, *, encrypted: bool = False, **options: Any) -> None:
        self._tensorizer = importlib.import_module(self.module)
        self._is_encrypted = encrypted
        self._options = options
        if encrypted:
            options["encryption"] = self._tensorizer.DecryptionParams.from_key(KEY)

    def load(self, job: Job) -> Tensors:
        return self._read(job)

    def cast(self, job: Job) -> Tensors:
        return self._read(job, dtype=torch.float16)

    def select(self, job: Job) -> Tensors:
        return self._read(job, filter_func=frozenset(job.names).__contains__)

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

    def _read(self, job: Job, **options: Any) -> Tensors:
        tensors: Tensors = {}
        for path in job.paths:
            with self._tensorizer.TensorDeserializer(path, device=job.device, **self._options, **options) as file:
                tensors |= {str(name): tensor for name, tensor in file.items()}
        return tensors


class FstTensors(Tensorizer):
    """Loads tensorizer's format with fst."""

    module = "fst.compat.tensorizer"

    def reader(self, job: Job) -> str:
        # The operator that tells takes no key.
        return "pread" if self._is_encrypted else str(torch.ops.fst.reader(job.paths, job.device))
