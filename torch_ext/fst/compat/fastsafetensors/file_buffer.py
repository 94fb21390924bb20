"""Loaded tensors by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fst._core.errors import TensorNotFoundError
from fst._core.group import Group
from fst.compat.fastsafetensors import _exchange
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata
from fst.compat.fastsafetensors.st_types import Device, DeviceLike, DType, DTypeLike, as_torch_dtype


class FilesBufferOnDevice:
    """Tensors loaded by `SafeTensorsFileLoader.copy_files_to_device`.

    Tensors own their storage, and stay valid after the buffer is closed.

    A single process has all tensors: the shard of a tensor is the whole tensor, and the same name always returns the
    same tensor. In a group of several ranks, each rank has the tensors of its own files. `get_tensor`, `get_sharded`,
    `get_multi_cols`, `as_dict` and `push_tensor` then send tensors between ranks. All ranks call them in the same
    order, any number of times. Each call returns new tensors.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        locations: dict[str, tuple[int, int]],
        files: Mapping[str, SafeTensorsMetadata],
        group: Group,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self.key_to_rank_lidx = locations
        self._group = group
        # The tensors of this rank's files, or None after `close`.
        self._tensors: dict[str, Tensor] | None = tensors
        self._files = files
        self._device = device
        # The dtype to which all tensors were cast, or None.
        self._dtype = dtype

    def close(self) -> None:
        """Releases the tensors. Returned tensors stay valid. Further calls have no effect."""
        self._tensors = None

    def get_filename(self, tensor_name: str) -> str:
        """Returns the path of the file that holds a tensor."""
        self._require(tensor_name)
        return self._files[tensor_name].src

    def get_shape(self, tensor_name: str) -> list[int]:
        """Returns the shape of a tensor in its header."""
        self._require(tensor_name)
        return self._files[tensor_name].tensors[tensor_name].shape

    def get_tensor(self, tensor_name: str, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO) -> Tensor:
        """Returns a tensor, converted to a device and a dtype if they are given.

        Raises:
            KeyError: No file holds the name. The exception is also a ValueError.
            RuntimeError: The buffer is closed.
        """
        return TensorBase(self._whole(tensor_name)).to(device, dtype).get_raw()

    def get_sharded(
        self, tensor_name: str, dim: int, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO
    ) -> Tensor:
        """Returns this rank's shard of a tensor that is split along `dim`, or the whole tensor if `dim` is -1.

        The shards are the chunks of `torch.chunk`: of equal length, except that the last ranks may get shorter or empty
        ones. Other negative dimensions count from the last.

        Raises:
            IndexError: The tensor does not have the dimension.
            Errors of `get_tensor`.
        """
        shard = self._whole(tensor_name) if dim == -1 else self._shard(tensor_name, dim)
        return TensorBase(shard).to(device, dtype).get_raw()

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO
    ) -> Tensor | None:
        """Sends a tensor to a rank. Returns the tensor on that rank, and None on others. One process always returns it.

        Raises:
            ValueError: The group does not have the rank.
            Errors of `get_tensor`.
        """
        tensors = self._opened(tensor_name)
        source, _ = self.key_to_rank_lidx[tensor_name]
        if self._group.size == 1:
            return TensorBase(tensors[tensor_name]).to(device, dtype).get_raw()
        if not 0 <= dst_rank < self._group.size:
            raise ValueError(f'"{tensor_name}" is for rank {dst_rank}, but the group has {self._group.size} ranks')
        if self._group.rank == source != dst_rank:
            _exchange.send(self._group, tensors[tensor_name], dst_rank)
        if self._group.rank != dst_rank:
            return None
        if source == dst_rank:
            pushed = tensors[tensor_name].clone()
        else:
            pushed = self._empty(tensor_name)
            _exchange.receive(self._group, pushed, source)
        return TensorBase(pushed).to(device, dtype).get_raw()

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO
    ) -> TensorBase:
        """Concatenates the shards of several tensors along `dim`, in the order of the names, in a `TensorBase`.

        Negative dimensions count from the last. Unlike in `get_sharded`, -1 is the last dimension.

        Raises:
            RuntimeError: The other dimensions of the shards differ.
            Errors of `get_sharded`.
        """
        shards = [self._shard(name, dim) for name in tensor_names]
        if {shard.dtype for shard in shards} == {torch.float4_e2m1fn_x2}:
            # PyTorch cannot concatenate this dtype.
            joined = torch.cat([shard.view(torch.uint8) for shard in shards], dim).view(torch.float4_e2m1fn_x2)
        else:
            joined = torch.cat(shards, dim)
        return TensorBase(joined).to(device, dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """Returns the shards of tensors, given a dimension for each name, each in a `TensorBase`."""
        return {name: TensorBase(self.get_sharded(name, dim)) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors of a single process. Raises RuntimeError in a group of several ranks."""
        if self._group.size > 1:
            raise RuntimeError("in a group of several ranks no rank has all tensors; use get_tensor")
        for name in tensor_names:
            yield name, self.get_tensor(name)

    def __enter__(self) -> "FilesBufferOnDevice":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _require(self, name: str) -> None:
        if name not in self.key_to_rank_lidx:
            raise TensorNotFoundError(f'no file that was loaded holds "{name}"')

    def _opened(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of this rank's files, after a check of the name and of `close`."""
        self._require(name)
        if self._tensors is None:
            raise RuntimeError(f'"{name}" was requested after close(); get tensors before, they stay valid afterwards')
        return self._tensors

    def _whole(self, name: str) -> Tensor:
        tensors = self._opened(name)
        if self._group.size == 1:
            return tensors[name]
        source, _ = self.key_to_rank_lidx[name]

        def allocate() -> Tensor:
            # A copy, since the caller may modify its tensor before the next call sends it again.
            return tensors[name].clone() if self._group.rank == source else self._empty(name)

        return _exchange.broadcast(self._group, allocate, source)

    def _shard(self, name: str, dim: int) -> Tensor:
        tensors = self._opened(name)
        shape = self._files[name].tensors[name].torch_shape
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f'"{name}" has {len(shape)} dimensions and cannot be split along dimension {dim}')
        size, rank = self._group.size, self._group.rank
        if size == 1:
            return tensors[name]
        source, _ = self.key_to_rank_lidx[name]

        def allocate() -> tuple[Tensor, list[Tensor]]:
            own = self._empty(name, _chunks(torch.empty(shape, device="meta"), size, dim)[rank].shape)
            return own, _chunks(tensors[name], size, dim) if rank == source else []

        return _exchange.scatter(self._group, allocate, source)

    def _empty(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Allocates memory for a tensor, or for a shard of it with another shape."""
        frame = self._files[name].tensors[name]
        dtype = self._dtype or as_torch_dtype(frame.dtype)
        return torch.empty(frame.torch_shape if shape is None else shape, dtype=dtype, device=self._device.as_str())


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Splits a tensor as `torch.chunk`, with empty chunks up to `count`."""
    chunks = tensor.chunk(count, dim)
    return [*chunks, *[tensor.narrow(dim, 0, 0)] * (count - len(chunks))]
