"""safetensors, the reference library: maps files, reads them, or (0.9) prefetches them to a GPU."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ..unsupported import UnsupportedError
from .base import Job, Loader, Tensors


class Safetensors(Loader):
    method = "mmap"

    def __init__(self) -> None:
        import safetensors.torch

        self._safetensors = safetensors

    def load(self, job: Job) -> Tensors:
        tensors: Tensors = {}
        for path in job.paths:
            tensors |= self._safetensors.torch.load_file(path, job.device)
        return tensors

    def slice(self, job: Job) -> Tensors:
        by_name = {cut.name: cut for cut in job.slices}
        with self._open(job) as files:
            return {
                name: file.get_slice(name)[by_name[name].index]
                for file in files
                for name in by_name.keys() & set(file.keys())
            }

    columns = slice

    def pretrained(self, job: Job) -> Tensors:
        from .transformers import pretrained_state

        return pretrained_state(job)

    def sharded(self, job: Job) -> Tensors:
        """Opens all files on each rank and slices tensors, as programs with ranks use safetensors."""
        with self._open(job) as files:
            return {
                name: self._chunk(file, name, job.dims[name])
                for file in files
                for name in job.dims.keys() & set(file.keys())
            }

    def save(self, tensors: Tensors, path: str) -> None:
        self._safetensors.torch.save_file(tensors, path)

    def select(self, job: Job) -> Tensors:
        with self._open(job) as files:
            # With one file, names are not listed: listing would cost more than the tensors.
            if len(files) == 1:
                return {name: files[0].get_tensor(name) for name in job.names}
            return {name: file.get_tensor(name) for file in files for name in set(job.names) & set(file.keys())}

    @staticmethod
    def _chunk(file: Any, name: str, dim: int | None) -> Tensor:
        import torch.distributed as dist

        chunk: Tensor
        if dim is None:
            chunk = file.get_tensor(name)
            return chunk
        stored = file.get_slice(name)
        length = -(-stored.get_shape()[dim] // dist.get_world_size())
        start = dist.get_rank() * length
        chunk = stored[(slice(None),) * dim + (slice(start, start + length),)]
        return chunk

    @contextmanager
    def _open(self, job: Job) -> Iterator[list[Any]]:
        with ExitStack() as stack:
            files = (self._safetensors.safe_open(path, framework="pt", device=job.device) for path in job.paths)
            yield [stack.enter_context(file) for file in files]


class SafetensorsCopied(Safetensors):
    """Copies parts of rows into memory of their own, which is what fst returns."""

    def sharded(self, job: Job) -> Tensors:
        return {name: tensor.contiguous() for name, tensor in super().sharded(job).items()}


class SafetensorsFlushed(Safetensors):
    def save(self, tensors: Tensors, path: str) -> None:
        super().save(tensors, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class SafetensorsPrefetch(Safetensors):
    method = "prefetch"

    def load(self, job: Job) -> Tensors:
        return self._prefetch(job, {})

    def slice(self, job: Job) -> Tensors:
        if any(cut.dim != 0 for cut in job.slices):
            raise UnsupportedError("prefetch slices the first dimension only")
        return self._prefetch(job, {cut.name: slice(cut.start, cut.start + cut.length) for cut in job.slices})

    def select(self, job: Job) -> Tensors:
        return self._prefetch(job, dict.fromkeys(job.names))

    def _prefetch(self, job: Job, plan: dict[str, Any]) -> Tensors:
        """Starts all files before waiting for the first. An empty plan means all tensors."""
        loaders = []
        with self._open(job) as files:
            for file in files:
                own = {name: plan[name] for name in plan.keys() & set(file.keys())} if plan else None
                try:
                    loaders.append(file.prefetch(own))
                except self._safetensors.SafetensorError as error:
                    if job.device == "cpu":
                        raise UnsupportedError(str(error)) from error
                    raise
            return {name: tensor for loader in loaders for name, tensor in loader}
