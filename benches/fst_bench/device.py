"""The device that tensors go to: waiting for it, and the memory it took."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# What PyTorch's caching allocator rounds every tensor up to.
ALLOCATION_BYTES = 512


class Device:
    """The CPU, of which there is nothing to say, or a GPU."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_cuda = name.startswith("cuda")
        self._free_bytes = self._reserved_bytes = self._allocated_bytes = 0

    def finish(self) -> None:
        """Waits for all that is queued."""
        if self._is_cuda:
            import torch

            torch.cuda.synchronize(self._name)

    def begin(self) -> None:
        """Notes what is taken before a load."""
        if self._is_cuda:
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._name)
            self._reserved_bytes = torch.cuda.memory_reserved(self._name)
            self._allocated_bytes = torch.cuda.memory_allocated(self._name)
            self._free_bytes = torch.cuda.mem_get_info(self._name)[0]

    def figures(self, tensors: "Mapping[str, Tensor]") -> dict[str, int]:
        """What a load took on a GPU, in bytes; nothing on the CPU.

        `device_reserved_bytes` is the peak of PyTorch's allocator. `device_bytes` is what the driver has less than
        before, whoever took it. `device_scratch_bytes` is what was taken beyond the tensors: the peak of allocations
        from PyTorch less the tensors, and what the driver gave to others than PyTorch.
        """
        if not self._is_cuda:
            return {}
        import torch

        peak_reserved = torch.cuda.max_memory_reserved(self._name) - self._reserved_bytes
        still_reserved = torch.cuda.memory_reserved(self._name) - self._reserved_bytes
        peak_allocated = torch.cuda.max_memory_allocated(self._name) - self._allocated_bytes
        held = self._free_bytes - torch.cuda.mem_get_info(self._name)[0]
        wanted = sum(-(-tensor.nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES for tensor in tensors.values())
        return {
            "device_reserved_bytes": peak_reserved,
            "device_bytes": held,
            "device_scratch_bytes": max(0, peak_allocated - wanted) + max(0, held - still_reserved),
        }
