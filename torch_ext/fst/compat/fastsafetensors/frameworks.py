"""PyTorch, and its tensors and process groups in the wrapping that some functions take and return."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.dtypes import shape_in_header
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst.compat._ranks import ranks_of
from fst.compat.fastsafetensors.st_types import Device, DType, as_device, as_dtype, as_torch_dtype


class TensorBase:
    """A tensor of PyTorch, with its device and dtype in the words of this package."""

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw

    @property
    def device(self) -> Device:
        """Where it is."""
        return as_device(self._raw.device)

    @property
    def dtype(self) -> DType:
        """What it holds."""
        return as_dtype(self._raw.dtype)

    def get_raw(self) -> Tensor:
        """The tensor of PyTorch."""
        return self._raw

    def get_shape(self) -> list[int]:
        """The shape as a file has it, where the elements of F4 count one by one and not in pairs."""
        return shape_in_header(self.dtype.value, self._raw.shape)

    def get_nbytes(self) -> int:
        """The size in bytes."""
        return self._raw.nbytes

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._raw.data_ptr()

    def to(
        self,
        device: Device | torch.device | str | int | None = None,
        dtype: DType | torch.dtype = DType.AUTO,
    ) -> "TensorBase":
        """On another device, with another dtype; itself where neither differs."""
        place = self._raw.device if device is None else as_device(device).as_str()
        return TensorBase(self._raw.to(device=place, dtype=as_torch_dtype(dtype)))

    def clone(self) -> "TensorBase":
        """A copy."""
        return TensorBase(self._raw.clone())

    def detach(self) -> "TensorBase":
        """As `Tensor.detach`."""
        return TensorBase(self._raw.detach())

    def contiguous(self) -> "TensorBase":
        """As `Tensor.contiguous`."""
        return TensorBase(self._raw.contiguous())

    def view(self, dtype: DType | torch.dtype) -> "TensorBase":
        """The same bytes as elements of another dtype."""
        wanted = as_torch_dtype(dtype)
        return self if wanted is None else TensorBase(self._raw.view(wanted))

    def reshape(self, shape: list[int]) -> "TensorBase":
        """As `Tensor.reshape`."""
        return TensorBase(self._raw.reshape(shape))

    def __getitem__(self, index: Any) -> "TensorBase":
        return TensorBase(self._raw[index])

    def __repr__(self) -> str:
        return f"TensorBase({self._raw!r})"


class ProcessGroupBase:
    """The ranks that load together, and how tensors go from one to others: byte by byte, whatever their dtype.

    Ranks are those of the group. Tensors may be on any device, and those that are written are contiguous. A group of
    one exchanges nothing.

    Attributes:
        ranks: The ranks, as fst has them.
    """

    def __init__(self, ranks: Group) -> None:
        self.ranks = ranks

    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def rank(self) -> int:
        """The rank of this process."""
        return self.ranks.rank

    def broadcast(self, dst: TensorBase, rank: int) -> None:
        """Overwrites `dst` with that of a rank. Every rank calls it."""
        self.broadcast_made(lambda: dst, rank)

    def broadcast_made(self, make: Callable[[], TensorBase], rank: int) -> TensorBase:
        """What a rank makes, on every rank: the others make a tensor to be overwritten.

        Where one rank fails to, every rank raises: the others a RankError.
        """
        with defer_interrupts():
            dst, moved = self.ranks.run_on_all(lambda: self._carried(make()))
            if self.ranks.process_group is not None and len(moved) > 0:
                dist.broadcast(moved, group=self.ranks.process_group, group_src=rank)
                _place(moved, dst)
        return dst

    def scatter(self, dst: TensorBase, scatter_list: Sequence[TensorBase], src: int) -> None:
        """Overwrites `dst` with this rank's tensor of the list that the rank `src` has. Every rank calls it.

        The tensors of the list may differ in size. Other ranks than `src` give an empty list.
        """
        self.scatter_made(lambda: (dst, scatter_list), src)

    def scatter_made(self, make: Callable[[], tuple[TensorBase, Sequence[TensorBase]]], src: int) -> TensorBase:
        """As `scatter`, of the tensor and the list that are made. Where one rank fails to, every rank raises."""
        with defer_interrupts():
            dst, received, sent, sizes = self.ranks.run_on_all(lambda: self._packed(*make()))
            if self.ranks.process_group is None:
                received.copy_(sent)
            else:
                from_src = [len(received) if rank == src else 0 for rank in range(self.size())]
                dist.all_to_all_single(received, sent, from_src, sizes, group=self.ranks.process_group)
            _place(received, dst)
        return dst

    def send(self, t: TensorBase, dst_rank: int, tag: int = 0) -> None:
        """Sends a tensor to a rank, which calls `recv`."""
        _, sent = self._carried(t.contiguous())
        if self.ranks.process_group is not None and len(sent) > 0:
            dist.send(sent, group=self.ranks.process_group, group_dst=dst_rank, tag=tag)

    def recv(self, t: TensorBase, src_rank: int, tag: int = 0) -> None:
        """Overwrites a tensor with what a rank sends."""
        _, received = self._carried(t)
        if self.ranks.process_group is not None and len(received) > 0:
            dist.recv(received, group=self.ranks.process_group, group_src=src_rank, tag=tag)
            _place(received, t)

    def _carried(self, tensor: TensorBase) -> tuple[TensorBase, Tensor]:
        """A tensor, and its bytes where the group can move them: the tensor's own memory, or a copy."""
        return tensor, _bytes_of(tensor).to(self.ranks.device)

    def _packed(
        self, dst: TensorBase, scatter_list: Sequence[TensorBase]
    ) -> tuple[TensorBase, Tensor, Tensor, list[int]]:
        """`dst` and its bytes, and the bytes of the list in one piece with the size of each."""
        pieces = [self._carried(tensor.contiguous())[1] for tensor in scatter_list]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=self.ranks.device)
        return *self._carried(dst), sent, [len(piece) for piece in pieces] or [0] * self.size()


def _bytes_of(tensor: TensorBase) -> Tensor:
    return tensor.get_raw().detach().view(-1).view(torch.uint8)


def _place(moved: Tensor, tensor: TensorBase) -> None:
    if moved.data_ptr() != tensor.data_ptr():
        _bytes_of(tensor).copy_(moved)


class Framework:
    """What functions take to know that tensors are PyTorch's."""

    def get_name(self) -> str:
        """Its name."""
        return "pytorch"

    def get_process_group(self, pg: Any, device: Device | torch.device | str | int = "cpu") -> ProcessGroupBase:
        """A process group of `torch.distributed`, wrapped, for tensors on a device. None is this process alone.

        Raises TypeError for what is no process group, and ValueError where this process is not in the group.
        """
        return ProcessGroupBase(ranks_of(pg, torch.device(as_device(device).as_str())))


def get_framework_op(name: str) -> Framework:
    """The framework of a name: "pt", "torch" or "pytorch". No other can be had."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'the framework "{name}" is not supported; fst loads for PyTorch, whose name is "pt"')
    return Framework()
