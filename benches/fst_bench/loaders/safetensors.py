"""safetensors, the reference library: maps files, reads them, or (0.9) prefetches them to a GPU."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ..child import UnsupportedError
from ..workload import Slice
from .base import Loader


class Safetensors(Loader):
    method = "mmap"

    def __init__(self) -> None:
        import safetensors.torch

        self._safetensors = safetensors

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in paths:
            tensors |= self._safetensors.torch.load_file(path, device)
        return tensors

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        by_name = {cut.name: cut for cut in slices}
        tensors: dict[str, Tensor] = {}
        with self._open(paths, device) as files:
            for file in files:
                for name in by_name.keys() & set(file.keys()):
                    tensors[name] = file.get_slice(name)[by_name[name].index]
        return tensors

    def columns(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        return self.slice(paths, slices, device)

    def pretrained(self, folder: str, device: str) -> dict[str, Tensor]:
        from .transformers import pretrained_state

        return pretrained_state(folder, device)

    def sharded(self, paths: Sequence[str], dims: Mapping[str, int | None], device: str) -> dict[str, Tensor]:
        """Opens all files on each rank and slices tensors, as programs with ranks use safetensors."""
        tensors: dict[str, Tensor] = {}
        with self._open(paths, device) as files:
            for file in files:
                for name in dims.keys() & set(file.keys()):
                    tensors[name] = self._chunk(file, name, dims[name])
        return tensors

    def save(self, tensors: Mapping[str, Tensor], path: str) -> None:
        self._safetensors.torch.save_file(dict(tensors), path)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        with self._open(paths, device) as files:
            # With one file, names are not listed: listing would cost more than the tensors.
            if len(files) == 1:
                return {name: files[0].get_tensor(name) for name in names}
            return {name: file.get_tensor(name) for file in files for name in set(names) & set(file.keys())}

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
    def _open(self, paths: Sequence[str], device: str) -> Iterator[list[Any]]:
        with ExitStack() as stack:
            files = (self._safetensors.safe_open(path, framework="pt", device=device) for path in paths)
            yield [stack.enter_context(file) for file in files]


class SafetensorsFlushed(Safetensors):
    def save(self, tensors: Mapping[str, Tensor], path: str) -> None:
        super().save(tensors, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class SafetensorsPrefetch(Safetensors):
    method = "prefetch"

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._prefetch(paths, {}, device)

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        if any(cut.dim != 0 for cut in slices):
            raise UnsupportedError("prefetch slices the first dimension only")
        return self._prefetch(paths, {cut.name: slice(cut.start, cut.start + cut.length) for cut in slices}, device)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._prefetch(paths, dict.fromkeys(names), device)

    def _prefetch(self, paths: Sequence[str], plan: dict[str, Any], device: str) -> dict[str, Tensor]:
        """Starts all files before waiting for the first. An empty plan means all tensors."""
        loaders = []
        with self._open(paths, device) as files:
            for file in files:
                own = {name: plan[name] for name in plan.keys() & set(file.keys())} if plan else None
                try:
                    loaders.append(file.prefetch(own))
                except self._safetensors.SafetensorError as error:
                    if device == "cpu":
                        raise UnsupportedError(str(error)) from error
                    raise
            return {name: tensor for loader in loaders for name, tensor in loader}
