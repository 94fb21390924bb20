"""fst, the library of this repository."""

from typing import Any

import torch

from ..checkpoint import TORCH_DTYPES
from .base import Job, Loader, Tensors


class Fst(Loader):
    """Loads with `options` of `load_files` and `load_sharded`, by several ranks with a strategy."""

    def __init__(self, strategy: str = "auto", **options: Any) -> None:
        import fst

        self._fst = fst
        self._strategy: Any = strategy
        self._options = options

    def load(self, job: Job) -> Tensors:
        return self._fst.load_files(job.paths, job.device, **self._options)

    def cast(self, job: Job) -> Tensors:
        return self._fst.load_files(job.paths, job.device, dtype=torch.float16)

    def slice(self, job: Job) -> Tensors:
        cuts = ((cut.name, cut.dim, cut.start, cut.length) for cut in job.slices)
        names, dims, starts, lengths = zip(*cuts, strict=True)
        return dict(zip(names, self._fst.load_slices(job.paths, names, dims, starts, lengths, job.device), strict=True))

    def select(self, job: Job) -> Tensors:
        return dict(zip(job.names, self._fst.load_tensors(job.paths, job.names, job.device), strict=True))

    def columns(self, job: Job) -> Tensors:
        with self._fst.safe_open(job.paths, framework="pt", device=job.device) as file:
            return {cut.name: file.get_slice(cut.name)[cut.index] for cut in job.slices}

    def pretrained(self, job: Job) -> Tensors:
        from .transformers import pretrained_state

        with self._fst.patch():
            return pretrained_state(job)

    def prepare(self, job: Job) -> None:
        if job.action == "sharded":
            _ = self._fst.load_sharded

    def sharded(self, job: Job) -> Tensors:
        from torch.distributed.tensor import Replicate, Shard

        placements = {name: Replicate() if dim is None else Shard(dim) for name, dim in job.dims.items()}
        return self._fst.load_sharded(
            job.paths, placements, device=job.device, strategy=self._strategy, **self._options
        )

    def save(self, tensors: Tensors, path: str) -> None:
        self._fst.save_file(tensors, path)

    def reader(self, job: Job) -> str:
        return str(torch.ops.fst.reader(job.paths, job.device))


class FstInto(Fst):
    """Loads into tensors that exist, as a model's parameters do."""

    def prepare(self, job: Job) -> None:
        with self._fst.safe_open(job.paths, framework="pt", device=job.device) as file:
            metas = {name: file.get_tensor_meta(name) for name in file.offset_keys()}
        self._tensors = {
            name: torch.zeros(meta.shape, dtype=TORCH_DTYPES[meta.dtype], device=job.device)
            for name, meta in metas.items()
        }

    def load(self, job: Job) -> Tensors:
        self._fst.load_into(job.paths, list(self._tensors), list(self._tensors.values()))
        return self._tensors
