"""Pool of GPU buffers."""

import torch

from fst.compat.unifiedefficientloader._buffer_pool import BufferPool


class GpuBufferPool(BufferPool):
    """Pool of `num_buffers` uint8 tensors of `size_bytes` bytes each on a device."""

    def __init__(self, size_bytes: int, num_buffers: int, device: torch.device | str = "cuda") -> None:
        self.size_bytes = size_bytes
        self.device = device
        super().__init__([torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)])
