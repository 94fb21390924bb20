"""Pool of pinned host buffers."""

import torch

from fst.compat.unifiedefficientloader._buffer_pool import BufferPool


class PinnedBufferPool(BufferPool):
    """Pool of `num_buffers` uint8 tensors of `size_bytes` bytes each, pinned if CUDA is available."""

    def __init__(self, size_bytes: int, num_buffers: int) -> None:
        self.size_bytes = size_bytes
        pinned = torch.cuda.is_available()
        super().__init__([torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_buffers)])
