"""Tensors that were loaded, by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fst._core.errors import TensorNotFoundError
from fst._distributed.shards import Sharded, region_of
from fst.compat.fastsafetensors.frameworks import ProcessGroupBase, TensorBase
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata
from fst.compat.fastsafetensors.st_types import Device, DType, as_torch_dtype


class FilesBufferOnDevice:
    """What `SafeTensorsFileLoader.copy_files_to_device` returns.

    Each tensor has memory of its own. It stays when the buffer is closed, and goes when nobody refers to it.

    A process alone has all tensors: the shard of a tensor is the whole, and the same name gives the same tensor each
    time. In a group of several ranks each has the tensors of its own files, and `get_tensor`, `get_sharded`,
    `get_multi_cols`, `as_dict` and `push_tensor` move tensors from rank to rank. All ranks call them in the same order,
    and as often as they like; what is returned is the caller's alone.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        places: dict[str, tuple[int, int]],
        files: Mapping[str, SafeTensorsMetadata],
        pg: ProcessGroupBase,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self.key_to_rank_lidx = places
        self.pg = pg
        # Those that this rank has read.
        self._tensors: dict[str, Tensor] | None = tensors
        self._files = files
        self._device = device
        # What all tensors were cast to.
        self._dtype = dtype

    def close(self) -> None:
        """Lets go of the tensors. Those that were got stay valid. A second time it does nothing."""
        self._tensors = None

    def get_filename(self, tensor_name: str) -> str:
        """The file that holds a tensor."""
        self._require(tensor_name)
        return self._files[tensor_name].src

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of a tensor, as its file has it."""
        self._require(tensor_name)
        return self._files[tensor_name].tensors[tensor_name].shape

    def get_tensor(
        self,
        tensor_name: str,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> Tensor:
        """A tensor, on another device or with another dtype if asked for.

        Raises KeyError, which is a ValueError too, where no file holds the name, and RuntimeError after `close`.
        """
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_tensor_wrapped(
        self,
        tensor_name: str,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> TensorBase:
        """As `get_tensor`, wrapped."""
        return TensorBase(self._whole(tensor_name)).to(device, dtype)

    def get_sharded(
        self,
        tensor_name: str,
        dim: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> Tensor:
        """This rank's part of a tensor that is split along `dim`; the whole tensor for -1.

        Parts are those of `torch.chunk`: as long as another for all ranks but the last, which may have less or nothing.
        Other negative dimensions count from the last.

        Raises IndexError where the tensor has no such dimension, and the errors of `get_tensor`.
        """
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_sharded_wrapped(
        self,
        tensor_name: str,
        dim: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> TensorBase:
        """As `get_sharded`, wrapped."""
        part = self._whole(tensor_name) if dim == -1 else self._part(tensor_name, dim)
        return TensorBase(part).to(device, dtype)

    def push_tensor(
        self,
        tensor_name: str,
        dst_rank: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> Tensor | None:
        """Sends a tensor to a rank, which returns it; other ranks return None. A process alone always returns it.

        Raises ValueError where there is no such rank, and the errors of `get_tensor`.
        """
        tensors = self._opened(tensor_name)
        source, _ = self.key_to_rank_lidx[tensor_name]
        if self.pg.size() == 1:
            return TensorBase(tensors[tensor_name]).to(device, dtype).get_raw()
        if not 0 <= dst_rank < self.pg.size():
            raise ValueError(f'"{tensor_name}" is to go to rank {dst_rank}, but the group has {self.pg.size()} ranks')
        if self.pg.rank() == source != dst_rank:
            self.pg.send(TensorBase(tensors[tensor_name]), dst_rank)
        if self.pg.rank() != dst_rank:
            return None
        if source == dst_rank:
            pushed = TensorBase(tensors[tensor_name]).clone()
        else:
            pushed = TensorBase(self._empty(tensor_name))
            self.pg.recv(pushed, source)
        return pushed.to(device, dtype).get_raw()

    def get_multi_cols(
        self,
        tensor_names: Sequence[str],
        dim: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> TensorBase:
        """The shards of several tensors, one behind the other along `dim`, in the order of the names; wrapped.

        Negative dimensions count from the last; -1 is the last one, too, and not the whole tensor.

        Raises RuntimeError where their other dimensions differ, and the errors of `get_sharded`.
        """
        shards = [self._part(name, dim) for name in tensor_names]
        return TensorBase(_concatenated(shards, dim)).to(device, dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """The shards of all tensors that are named with a dimension, wrapped."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a process alone. Raises RuntimeError in a group of several ranks."""
        if self.pg.size() > 1:
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
        """The tensors that this rank has read, for what is to be got by a name."""
        self._require(name)
        if self._tensors is None:
            raise RuntimeError(f'"{name}" was asked for after close(); get tensors before, they stay valid afterwards')
        return self._tensors

    def _whole(self, name: str) -> Tensor:
        tensors = self._opened(name)
        if self.pg.size() == 1:
            return tensors[name]
        source, _ = self.key_to_rank_lidx[name]

        def make() -> TensorBase:
            # What the caller does to its tensor is not to reach those that are sent later.
            return TensorBase(tensors[name].clone() if self.pg.rank() == source else self._empty(name))

        return self.pg.broadcast_made(make, source).get_raw()

    def _part(self, name: str, dim: int) -> Tensor:
        tensors = self._opened(name)
        shape = self._files[name].tensors[name].torch_shape
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f'"{name}" has {len(shape)} dimensions and cannot be split along dimension {dim}')
        if self.pg.size() == 1:
            return tensors[name]
        source, _ = self.key_to_rank_lidx[name]
        parts = [region_of(Sharded(dim), shape, rank, self.pg.size()) for rank in range(self.pg.size())]

        def make() -> tuple[TensorBase, list[TensorBase]]:
            dst = TensorBase(self._empty(name, parts[self.pg.rank()].lengths))
            if self.pg.rank() != source:
                return dst, []
            whole = tensors[name]
            return dst, [TensorBase(whole.narrow(dim, part.starts[dim], part.lengths[dim])) for part in parts]

        return self.pg.scatter_made(make, source).get_raw()

    def _empty(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """For what arrives of a tensor: the whole, or a part of this shape."""
        frame = self._files[name].tensors[name]
        dtype = self._dtype or as_torch_dtype(frame.dtype)
        return torch.empty(frame.torch_shape if shape is None else shape, dtype=dtype, device=self._device.as_str())


def _concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if {tensor.dtype for tensor in tensors} == {torch.float4_e2m1fn_x2}:
        # PyTorch does not know how to do it.
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim).view(torch.float4_e2m1fn_x2)
    return torch.cat(list(tensors), dim)
