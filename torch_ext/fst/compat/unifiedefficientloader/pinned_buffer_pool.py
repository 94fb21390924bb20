"""Buffers in pinned host memory."""

import torch

from fst.compat.unifiedefficientloader._buffer_pool import BufferPool


class PinnedBufferPool(BufferPool):
    """`num_buffers` tensors of uint8 with `size_bytes` each, pinned where there is CUDA and pageable where not."""

    def __init__(self, size_bytes: int, num_buffers: int) -> None:
        self.size_bytes = size_bytes
        pinned = torch.cuda.is_available()
        super().__init__([torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_buffers)])
