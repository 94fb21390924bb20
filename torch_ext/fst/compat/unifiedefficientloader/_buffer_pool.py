"""Pool of buffers of equal size."""

import queue

from torch import Tensor


class BufferPool:
    """Thread-safe pool of buffers.

    fst itself needs no such pool: loaded tensors own their storage, and fst manages its own staging memory.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
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
