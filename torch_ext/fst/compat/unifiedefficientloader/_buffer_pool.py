"""Buffers of one size, lent one by one."""

import queue

from torch import Tensor


class BufferPool:
    """Lends the buffers it was given. Any number of threads may use it.

    Nothing in fst needs such a pool: its tensors are their owner's, and staging is its own affair.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.num_buffers = len(buffers)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lent = [True] * len(buffers)
        for index in range(len(buffers)):
            self.release(index)

    def acquire(self) -> tuple[int, Tensor]:
        """A buffer and its number. Waits until one is free."""
        index = self._free.get()
        self._lent[index] = True
        return index, self.buffers[index]

    def release(self, idx: int) -> None:
        """Takes a buffer back. Raises ValueError for one that is not lent, which two would get otherwise."""
        if not 0 <= idx < self.num_buffers or not self._lent[idx]:
            raise ValueError(f"buffer {idx} of {self.num_buffers} is not lent")
        self._lent[idx] = False
        self._free.put(idx)
