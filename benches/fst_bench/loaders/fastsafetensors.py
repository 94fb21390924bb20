"""fastsafetensors: reads each file into one block. The tensors are views that keep the block alive."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..child import UnsupportedError
from ..workload import Slice
from .base import Loader


class Fastsafetensors(Loader):
    def __init__(self) -> None:
        from fastsafetensors.common import is_odirect_enabled

        import fastsafetensors

        self._fastsafetensors = fastsafetensors
        self._is_direct = is_odirect_enabled

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, None, device)

    def cast(self, paths: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        from fastsafetensors.st_types import DType

        return self._read(paths, None, device, dtype={torch.float16: DType.F16}[dtype])

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        raise UnsupportedError("slices only across the ranks of a process group, after loading the whole")

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, frozenset(names), device)

    def sharded(self, paths: Sequence[str], dims: Mapping[str, int | None], device: str) -> dict[str, Tensor]:
        """Loads whole files on each rank, and runs a collective for each tensor."""
        import torch.distributed as dist

        ranks = dist.get_world_size()
        loader = self._fastsafetensors.SafeTensorsFileLoader(dist.group.WORLD, device, nogds=True)
        loader.add_filenames({rank: list(paths[rank::ranks]) for rank in range(ranks)})
        block = loader.copy_files_to_device()
        tensors = {
            name: block.get_tensor(name) if (dim := dims[name]) is None else block.get_sharded(name, dim)
            for name in loader.get_keys()
        }
        block.close()
        loader.close()
        return tensors

    def reader(self, paths: Sequence[str], device: str) -> str:
        return "pread, O_DIRECT" if self._is_direct(paths[0], buffered_ram_fs=True) else "pread"

    def _read(
        self, paths: Sequence[str], names: frozenset[str] | None, device: str, **options: Any
    ) -> dict[str, Tensor]:
        file_loader = self._fastsafetensors.SafeTensorsFileLoader(None, device, nogds=True)
        file_loader.add_filenames({0: list(paths)})
        if names is not None:
            file_loader.set_tensor_filter(names.__contains__)
        block = file_loader.copy_files_to_device()
        tensors = {name: block.get_tensor(name, **options) for name in file_loader.get_keys()}
        block.close()
        file_loader.close()
        return tensors
