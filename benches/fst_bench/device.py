"""Device of a load: synchronization and memory figures."""

from collections.abc import Mapping

import torch
from torch import Tensor

# PyTorch's caching allocator rounds every tensor up to a multiple of this size.
ALLOCATION_BYTES = 512


class Device:
    """The CPU, which has no figures, or a GPU."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_cuda = name.startswith("cuda")
        self._free_bytes = self._reserved_bytes = self._allocated_bytes = 0

    def finish(self) -> None:
        """Waits for all queued work."""
        if self._is_cuda:
            torch.cuda.synchronize(self._name)

    def begin(self) -> None:
        """Records the memory in use before a load."""
        if self._is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._name)
            self._reserved_bytes = torch.cuda.memory_reserved(self._name)
            self._allocated_bytes = torch.cuda.memory_allocated(self._name)
            self._free_bytes = torch.cuda.mem_get_info(self._name)[0]

    def figures(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the memory that a load took on a GPU, in bytes; empty on the CPU.

        `device_peak_bytes` is the larger of the peak of PyTorch's allocator and the decrease of the driver's free
        memory. `device_scratch_bytes` is the memory beyond the tensors: the peak of PyTorch's
        allocations less the tensors, plus memory that others than PyTorch took from the driver.
        """
        if not self._is_cuda:
            return {}
        peak_reserved = torch.cuda.max_memory_reserved(self._name) - self._reserved_bytes
        still_reserved = torch.cuda.memory_reserved(self._name) - self._reserved_bytes
        peak_allocated = torch.cuda.max_memory_allocated(self._name) - self._allocated_bytes
        held = self._free_bytes - torch.cuda.mem_get_info(self._name)[0]
        tensor_bytes = sum(-(-tensor.nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES for tensor in tensors.values())
        return {
            "device_peak_bytes": max(peak_reserved, held),
            "device_scratch_bytes": max(0, peak_allocated - tensor_bytes) + max(0, held - still_reserved),
        }
