"""Tensors that were loaded, by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fst._errors import TensorNotFoundError
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata
from fst.compat.fastsafetensors.st_types import Device, DType


class FilesBufferOnDevice:
    """What `SafeTensorsFileLoader.copy_files_to_device` returns.

    Each tensor has memory of its own. It stays when the buffer is closed, and goes when nobody refers to it. The same
    name gives the same tensor each time.

    With a group of one rank, the only one so far, the shard of a tensor is the whole tensor.
    """

    def __init__(
        self, tensors: dict[str, Tensor], places: dict[str, tuple[int, int]], files: Mapping[str, SafeTensorsMetadata]
    ) -> None:
        self.key_to_rank_lidx = places
        self._tensors: dict[str, Tensor] | None = tensors
        self._files = files

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
        self._require(tensor_name)
        if self._tensors is None:
            raise RuntimeError(
                f'"{tensor_name}" was asked for after close(); get tensors before, they stay valid afterwards'
            )
        return TensorBase(self._tensors[tensor_name]).to(device, dtype)

    def get_sharded(
        self,
        tensor_name: str,
        dim: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> Tensor:
        """This rank's part of a tensor that is split along `dim`; the whole tensor for -1.

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
        tensor = self.get_tensor_wrapped(tensor_name, device, dtype)
        rank = len(self.get_shape(tensor_name))
        if dim != -1 and not -rank <= dim < rank:
            raise IndexError(f'"{tensor_name}" has {rank} dimensions and cannot be split along dimension {dim}')
        return tensor

    def push_tensor(
        self,
        tensor_name: str,
        dst_rank: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> Tensor | None:
        """Sends a tensor to a rank, which returns it; others return None. Here it is returned: there is one rank."""
        return self.get_tensor(tensor_name, device, dtype)

    def get_multi_cols(
        self,
        tensor_names: Sequence[str],
        dim: int,
        device: Device | torch.device | str | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> TensorBase:
        """The shards of several tensors, one behind the other along `dim`, in the order of the names; wrapped.

        Raises RuntimeError where their other dimensions differ, and the errors of `get_sharded`.
        """
        shards = [self.get_sharded(name, dim) for name in tensor_names]
        return TensorBase(torch.cat(shards, dim)).to(device, dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """The shards of all tensors that are named with a dimension, wrapped."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors."""
        for name in tensor_names:
            yield name, self.get_tensor(name)

    def __enter__(self) -> "FilesBufferOnDevice":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _require(self, name: str) -> None:
        if name not in self.key_to_rank_lidx:
            raise TensorNotFoundError(f'no file that was loaded holds "{name}"')
