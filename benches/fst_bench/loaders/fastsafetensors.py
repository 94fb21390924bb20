"""fastsafetensors: reads each file into one block. The tensors are views that keep the block alive."""

from typing import Any

from ..unsupported import UnsupportedError
from .base import Job, Loader, Tensors


class Fastsafetensors(Loader):
    def __init__(self) -> None:
        from fastsafetensors.common import is_odirect_enabled

        import fastsafetensors

        self._fastsafetensors = fastsafetensors
        self._is_direct = is_odirect_enabled

    def load(self, job: Job) -> Tensors:
        return self._read(job)

    def cast(self, job: Job) -> Tensors:
        from fastsafetensors.st_types import DType

        return self._read(job, dtype=DType.F16)

    def slice(self, job: Job) -> Tensors:
        raise UnsupportedError("slices only across the ranks of a process group, after loading the whole")

    select = load

    def sharded(self, job: Job) -> Tensors:
        """Loads whole files on each rank, and runs a collective for each tensor."""
        import torch.distributed as dist

        ranks = dist.get_world_size()
        loader = self._fastsafetensors.SafeTensorsFileLoader(dist.group.WORLD, job.device, nogds=True)
        loader.add_filenames({rank: job.paths[rank::ranks] for rank in range(ranks)})
        block = loader.copy_files_to_device()
        tensors = {
            name: block.get_tensor(name) if (dim := job.dims[name]) is None else block.get_sharded(name, dim)
            for name in loader.get_keys()
        }
        block.close()
        loader.close()
        return tensors

    def reader(self, job: Job) -> str:
        return "pread, O_DIRECT" if self._is_direct(job.paths[0], buffered_ram_fs=True) else "pread"

    def _read(self, job: Job, **options: Any) -> Tensors:
        file_loader = self._fastsafetensors.SafeTensorsFileLoader(None, job.device, nogds=True)
        file_loader.add_filenames({0: job.paths})
        if job.names:
            file_loader.set_tensor_filter(frozenset(job.names).__contains__)
        block = file_loader.copy_files_to_device()
        tensors = {name: block.get_tensor(name, **options) for name in file_loader.get_keys()}
        block.close()
        file_loader.close()
        return tensors
