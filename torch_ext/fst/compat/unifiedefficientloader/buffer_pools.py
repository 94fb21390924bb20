"""Pools of buffers of equal size.

fst itself needs no such pool: loaded tensors own their storage, and fst manages its own staging memory.
"""

import queue

import torch
from torch import Tensor


class _BufferPool:
    """Thread-safe pool of buffers."""

    def __init__(self, size_bytes: int, buffers: list[Tensor]) -> None:
        self.size_bytes = size_bytes
        self.buffers = buffers
        self.num_buffers = len(buffers)
        self.free_queue: queue.Queue[int] = queue.Queue()
        self._is_acquired = [True] * len(buffers)
        for index in range(len(buffers)):
            self.release(index)

    def acquire(self) -> tuple[int, Tensor]:
        """Returns the index of a free buffer and the buffer. Blocks until a buffer is free."""
        index = self.free_queue.get()
        self._is_acquired[index] = True
        return index, self.buffers[index]

    def release(self, idx: int) -> None:
        """Returns a buffer to the pool.

        Raises:
            ValueError: The buffer is not acquired, or the index is out of range.
        """
        if not 0 <= idx < self.num_buffers or not self._is_acquired[idx]:
            raise ValueError(f"buffer {idx} of {self.num_buffers} is not acquired")
        self._is_acquired[idx] = False
        self.free_queue.put(idx)


class GpuBufferPool(_BufferPool):
    """Pool of `num_buffers` uint8 tensors of `size_bytes` bytes each on a device."""

    def __init__(self, size_bytes: int, num_buffers: int, device: torch.device | str = "cuda") -> None:
        self.device = device
        super().__init__(
            size_bytes, [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        )


class PinnedBufferPool(_BufferPool):
    """Pool of `num_buffers` uint8 tensors of `size_bytes` bytes each, pinned if CUDA is available."""

    def __init__(self, size_bytes: int, num_buffers: int) -> None:
        pinned = torch.cuda.is_available()
        super().__init__(
            size_bytes, [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_buffers)]
        )
