"""Wrappers of PyTorch tensors and process groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.dtypes import shape_in_header
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst.compat._groups import group_of
from fst.compat.fastsafetensors.st_types import Device, DType, as_device, as_dtype, as_torch_dtype


class TensorBase:
    """PyTorch tensor, with its device and dtype in the types of this package."""

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw

    @property
    def device(self) -> Device:
        """Device of the tensor."""
        return as_device(self._raw.device)

    @property
    def dtype(self) -> DType:
        """Dtype of the tensor."""
        return as_dtype(self._raw.dtype)

    def get_raw(self) -> Tensor:
        """Returns the PyTorch tensor."""
        return self._raw

    def get_shape(self) -> list[int]:
        """Returns the shape in a header, which counts F4 numbers individually."""
        return shape_in_header(self.dtype.value, self._raw.shape)

    def get_nbytes(self) -> int:
        """Returns the size in bytes."""
        return self._raw.nbytes

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self._raw.data_ptr()

    def to(
        self,
        device: Device | torch.device | str | int | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> "TensorBase":
        """Converts the tensor to a device and a dtype. Copies only if one of them differs."""
        target = self._raw.device if device is None else as_device(device).as_str()
        return TensorBase(self._raw.to(device=target, dtype=as_torch_dtype(dtype)))

    def clone(self) -> "TensorBase":
        """Returns a copy."""
        return TensorBase(self._raw.clone())

    def detach(self) -> "TensorBase":
        """Detaches the tensor from autograd, as `Tensor.detach`."""
        return TensorBase(self._raw.detach())

    def contiguous(self) -> "TensorBase":
        """Returns a contiguous tensor, as `Tensor.contiguous`."""
        return TensorBase(self._raw.contiguous())

    def view(self, dtype: DType | torch.dtype) -> "TensorBase":
        """Reinterprets the bytes as another dtype. AUTO returns the tensor itself."""
        torch_dtype = as_torch_dtype(dtype)
        return self if torch_dtype is None else TensorBase(self._raw.view(torch_dtype))

    def reshape(self, shape: list[int]) -> "TensorBase":
        """Returns a tensor of another shape, as `Tensor.reshape`."""
        return TensorBase(self._raw.reshape(shape))

    def __getitem__(self, index: Any) -> "TensorBase":
        return TensorBase(self._raw[index])

    def __repr__(self) -> str:
        return f"TensorBase({self._raw!r})"


class ProcessGroupBase:
    """Group of ranks that send tensors of any dtype to each other, as bytes.

    Rank numbers are those of the group. Tensors may be on any device. Tensors that are written must be contiguous. A
    group of one rank sends nothing.

    Attributes:
        group: The group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def size(self) -> int:
        """Returns the number of ranks."""
        return self.group.size

    def rank(self) -> int:
        """Returns the rank of this process."""
        return self.group.rank

    def broadcast(self, dst: TensorBase, rank: int) -> None:
        """Overwrites `dst` on all ranks with `dst` of one rank. All ranks call this method."""
        self.allocate_and_broadcast(lambda: dst, rank)

    def allocate_and_broadcast(self, allocate: Callable[[], TensorBase], rank: int) -> TensorBase:
        """Broadcasts the tensor that `allocate` returns on one rank into those that it returns on the others.

        Returns:
            The tensor of this rank.

        Raises:
            RankError: `allocate` failed on another rank.
            Exceptions of `allocate` on this rank.
        """
        with defer_interrupts():
            dst, data = self.group.run_on_all(lambda: self._with_bytes(allocate()))
            if self.group.process_group is not None and len(data) > 0:
                dist.broadcast(data, group=self.group.process_group, group_src=rank)
                _copy_bytes(data, dst)
        return dst

    def scatter(self, dst: TensorBase, scatter_list: Sequence[TensorBase], src: int) -> None:
        """Overwrites `dst` with this rank's tensor from the list of the rank `src`. All ranks call this method.

        The sizes of the tensors may differ. Ranks other than `src` pass an empty list.
        """
        self.allocate_and_scatter(lambda: (dst, scatter_list), src)

    def allocate_and_scatter(
        self, allocate: Callable[[], tuple[TensorBase, Sequence[TensorBase]]], src: int
    ) -> TensorBase:
        """Scatters like `scatter`, with the arguments that `allocate` returns.

        Returns:
            The tensor of this rank.

        Raises:
            RankError: `allocate` failed on another rank.
            Exceptions of `allocate` on this rank.
        """
        with defer_interrupts():
            dst, received, sent, sizes = self.group.run_on_all(lambda: self._pack(*allocate()))
            if self.group.process_group is None:
                received.copy_(sent)
            else:
                from_src = [len(received) if rank == src else 0 for rank in range(self.size())]
                dist.all_to_all_single(received, sent, from_src, sizes, group=self.group.process_group)
            _copy_bytes(received, dst)
        return dst

    def send(self, t: TensorBase, dst_rank: int, tag: int = 0) -> None:
        """Sends a tensor to a rank, which calls `recv`."""
        _, sent = self._with_bytes(t.contiguous())
        if self.group.process_group is not None and len(sent) > 0:
            dist.send(sent, group=self.group.process_group, group_dst=dst_rank, tag=tag)

    def recv(self, t: TensorBase, src_rank: int, tag: int = 0) -> None:
        """Overwrites a tensor with the tensor that a rank sends."""
        _, received = self._with_bytes(t)
        if self.group.process_group is not None and len(received) > 0:
            dist.recv(received, group=self.group.process_group, group_src=src_rank, tag=tag)
            _copy_bytes(received, t)

    def _with_bytes(self, tensor: TensorBase) -> tuple[TensorBase, Tensor]:
        """Returns a tensor, and its bytes on the device of the collectives: a view or a copy."""
        return tensor, _bytes_of(tensor).to(self.group.device)

    def _pack(
        self, dst: TensorBase, scatter_list: Sequence[TensorBase]
    ) -> tuple[TensorBase, Tensor, Tensor, list[int]]:
        """Returns `dst`, its bytes, the concatenated bytes of the list, and the number of bytes for each rank."""
        chunks = [self._with_bytes(tensor.contiguous())[1] for tensor in scatter_list]
        sent = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8, device=self.group.device)
        return *self._with_bytes(dst), sent, [len(chunk) for chunk in chunks] or [0] * self.size()


def _bytes_of(tensor: TensorBase) -> Tensor:
    return tensor.get_raw().detach().view(-1).view(torch.uint8)


def _copy_bytes(data: Tensor, tensor: TensorBase) -> None:
    """Copies bytes into a tensor, unless they are a view of it."""
    if data.data_ptr() != tensor.data_ptr():
        _bytes_of(tensor).copy_(data)


class Framework:
    """PyTorch, as an argument of functions that support several frameworks."""

    def get_name(self) -> str:
        """Returns the name of the framework."""
        return "pytorch"

    def get_process_group(self, pg: Any, device: Device | torch.device | str | int = "cpu") -> ProcessGroupBase:
        """Wraps a process group of `torch.distributed` for tensors on a device. None is this process alone.

        Raises:
            TypeError: `pg` is not a process group.
            ValueError: This process is not a rank of the group.
        """
        return ProcessGroupBase(group_of(pg, torch.device(as_device(device).as_str())))


def get_framework_op(name: str) -> Framework:
    """Returns the framework "pt", "torch" or "pytorch". Raises NotImplementedError for any other name."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'the framework "{name}" is not supported; fst loads for PyTorch, whose name is "pt"')
    return Framework()
