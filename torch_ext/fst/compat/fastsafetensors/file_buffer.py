"""Loaded tensors by name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.errors import TensorNotFoundError
from fst._core.group import Group
from fst.compat.fastsafetensors import _exchange


class StoredTensor(NamedTuple):
    """Rank that reads a tensor, index of the file among the rank's files, the file, and the tensor's type."""

    rank: int
    index: int
    file: str
    dtype: torch.dtype
    shape: list[int]


class FilesBufferOnDevice:
    """Tensors loaded by `SafeTensorsFileLoader.copy_files_to_device`.

    Tensors own their storage, and stay valid after the buffer is closed.

    A single process has all tensors: the shard of a tensor is the whole tensor, and the same name always returns the
    same tensor. In a group of several ranks, each rank has the tensors of its own files, and `get_tensor` and
    `get_sharded` send tensors between ranks. All ranks call them in the same order, any number of times. Each call
    returns new tensors.

    Attributes:
        key_to_rank_lidx: The rank that reads a tensor and the index of the file there, by name.
    """

    def __init__(
        self, tensors: dict[str, Tensor], stored: Mapping[str, StoredTensor], group: Group, device: torch.device
    ) -> None:
        self.key_to_rank_lidx = {name: (tensor.rank, tensor.index) for name, tensor in stored.items()}
        self._group = group
        # The tensors of this rank's files, or None after `close`.
        self._tensors: dict[str, Tensor] | None = tensors
        self._stored = stored
        self._device = device

    def close(self) -> None:
        """Releases the tensors. Returned tensors stay valid. Further calls have no effect."""
        self._tensors = None

    def get_tensor(self, tensor_name: str) -> Tensor:
        """Returns a tensor.

        Raises:
            KeyError: No file holds the name. The exception is also a ValueError.
            RuntimeError: The buffer is closed.
        """
        tensors = self._opened(tensor_name)
        if self._group.size == 1:
            return tensors[tensor_name]
        source = self._stored[tensor_name].rank

        def allocate() -> Tensor:
            # A copy, since the caller may modify its tensor before the next call sends it again.
            return tensors[tensor_name].clone() if self._group.rank == source else self._empty(tensor_name)

        return _exchange.broadcast(self._group, allocate, source)

    def get_sharded(self, tensor_name: str, dim: int) -> Tensor:
        """Returns this rank's shard of a tensor that is split along `dim`, or the whole tensor if `dim` is -1.

        The shards are the chunks of `torch.chunk`: of equal length, except that the last ranks may get shorter or empty
        ones. Other negative dimensions count from the last.

        Raises:
            IndexError: The tensor does not have the dimension.
            Errors of `get_tensor`.
        """
        if dim == -1:
            return self.get_tensor(tensor_name)
        tensors = self._opened(tensor_name)
        source, _, _, _, shape = self._stored[tensor_name]
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f'"{tensor_name}" has {len(shape)} dimensions and cannot be split along dimension {dim}')
        size, rank = self._group.size, self._group.rank
        if size == 1:
            return tensors[tensor_name]

        def allocate() -> tuple[Tensor, list[Tensor]]:
            own = self._empty(tensor_name, _chunks(torch.empty(shape, device="meta"), size, dim)[rank].shape)
            return own, _chunks(tensors[tensor_name], size, dim) if rank == source else []

        return _exchange.scatter(self._group, allocate, source)

    def __enter__(self) -> "FilesBufferOnDevice":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _opened(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of this rank's files, after a check of the name and of `close`."""
        if name not in self._stored:
            raise TensorNotFoundError(f'no file that was loaded holds "{name}"')
        if self._tensors is None:
            raise RuntimeError(f'"{name}" was requested after close(); get tensors before, they stay valid afterwards')
        return self._tensors

    def _empty(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Allocates memory for a tensor, or for a shard of it with another shape."""
        stored = self._stored[name]
        return torch.empty(stored.shape if shape is None else shape, dtype=stored.dtype, device=self._device)


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Splits a tensor as `torch.chunk`, with empty chunks up to `count`."""
    chunks = tensor.chunk(count, dim)
    return [*chunks, *[tensor.narrow(dim, 0, 0)] * (count - len(chunks))]
