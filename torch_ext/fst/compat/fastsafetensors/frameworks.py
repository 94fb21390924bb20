"""Wrappers of PyTorch tensors and process groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fst._core.dtypes import PACKED, shape_in_header, shape_in_torch
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst.compat._groups import group_of
from fst.compat.fastsafetensors.st_types import (
    DTYPE_SIZES,
    Device,
    DeviceType,
    DType,
    as_device,
    as_dtype,
    as_torch_dtype,
)


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

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies the elements, in the order of a contiguous tensor, into writable memory of at least their size."""
        # PyTorch refuses empty memory.
        if self._raw.nbytes > 0:
            torch.frombuffer(buf, dtype=torch.uint8, count=self._raw.nbytes).copy_(_bytes_of(self.contiguous()))

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


class FrameworkOpBase:
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

    def get_global_rank(self) -> int:
        """Returns the rank in the default group of `torch.distributed`, or 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def get_device(self, device: Device | torch.device | str | int, pg: Any = None) -> Device:
        """Converts a device. `pg` has no effect."""
        return as_device(device)

    def set_device(self, device: Device) -> None:
        """Makes a GPU the current one. Other devices have no effect."""
        if device.type is not DeviceType.CPU:
            torch.cuda.set_device(device.as_str())

    def get_device_name(self, index: int) -> str:
        """Returns the name of a GPU, or an empty string without a GPU."""
        return torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""

    def get_cuda_ver(self) -> str:
        """Returns PyTorch's version of CUDA or ROCm, such as "cuda-13.0" or "hip-7.0". "0.0" without a GPU."""
        if not torch.cuda.is_available():
            return "0.0"
        return f"hip-{torch.version.hip}" if torch.version.hip else f"cuda-{torch.version.cuda}"

    def synchronize(self, device: Device) -> None:
        """Waits for all work on a GPU."""
        if device.type is not DeviceType.CPU:
            torch.cuda.synchronize(device.as_str())

    def synchronize_current_stream(self, device: Device) -> None:
        """Waits for the work on the current stream of a GPU."""
        if device.type is not DeviceType.CPU:
            torch.cuda.current_stream(device.as_str()).synchronize()

    def get_device_ptr_align(self) -> int:
        """Returns the alignment of pointers that kernels on GPUs expect, in bytes."""
        return 16

    def get_mem_used(self) -> int:
        """Returns 0: fst holds no memory beside the tensors."""
        return 0

    def support_fp8(self) -> bool:
        """Returns True: PyTorch has the F8 dtypes."""
        return True

    def get_dtype_size(self, dtype: DType) -> float:
        """Returns the size in bytes of one number in a header's shape."""
        return DTYPE_SIZES[dtype]

    def get_native_shape(self, dtype: DType, st_shape: list[int]) -> list[int]:
        """Returns the shape of the PyTorch tensor for a shape in a header.

        Raises:
            ValueError: The last dimension of an F4 tensor is missing or odd.
        """
        if dtype.value == PACKED and (not st_shape or st_shape[-1] % 2):
            raise ValueError(f"the last dimension of an F4 tensor must be even, not {st_shape}")
        return shape_in_torch(dtype.value, st_shape)

    def get_native_slices(
        self, dtype: DType, st_shape: list[int], slices: tuple[int | slice, ...]
    ) -> tuple[int | slice, ...]:
        """Returns the indices of the PyTorch tensor for indices of a shape in a header.

        Raises:
            ValueError: Indices of the last dimension of an F4 tensor split an element of PyTorch, or have a step.
        """
        if dtype.value != PACKED or not st_shape or len(slices) < len(st_shape):
            return slices
        last = slices[-1]
        start, stop, step = last.indices(st_shape[-1]) if isinstance(last, slice) else (last, last, 1)
        if start % 2 or stop % 2 or step != 1:
            raise ValueError(f"PyTorch has two F4 numbers in an element, which {last} would split")
        return *slices[:-1], slice(start // 2, stop // 2, 1) if isinstance(last, slice) else start // 2

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> TensorBase:
        """Allocates a tensor for a shape in a header."""
        native_shape = self.get_native_shape(dtype, shape)
        return TensorBase(torch.empty(native_shape, dtype=as_torch_dtype(dtype), device=device.as_str()))

    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> TensorBase:
        """Returns random numbers, as `torch.randn`."""
        return TensorBase(torch.randn(s, device=device.as_str(), dtype=as_torch_dtype(dtype)))

    def wrap_tensor(self, tensor: Tensor) -> TensorBase:
        """Wraps a PyTorch tensor. Copies nothing."""
        return TensorBase(tensor)

    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> TensorBase:
        """Wraps a DLPack capsule, as `torch.from_dlpack`. `device` and `dtype` have no effect."""
        return TensorBase(from_dlpack(dl_tensor))

    def copy_tensor(self, dst: TensorBase, src: TensorBase) -> None:
        """Overwrites `dst` with `src`, as `Tensor.copy_`."""
        dst.get_raw().copy_(src.get_raw())

    def concat_tensors(self, tensors: Sequence[TensorBase], dim: int) -> TensorBase:
        """Concatenates tensors, as `torch.cat`."""
        raws = [tensor.get_raw() for tensor in tensors]
        if {raw.dtype for raw in raws} == {torch.float4_e2m1fn_x2}:
            # PyTorch cannot concatenate this dtype.
            return TensorBase(torch.cat([raw.view(torch.uint8) for raw in raws], dim).view(torch.float4_e2m1fn_x2))
        return TensorBase(torch.cat(raws, dim))

    def is_equal(self, wrapped: TensorBase, real: Tensor) -> bool:
        """Returns whether all elements are equal. Shapes are broadcast, and NaN differs from NaN.

        Raises:
            TypeError: `real` is not a tensor.
        """
        if not isinstance(real, Tensor):
            raise TypeError(f"expected a tensor, not {type(real).__name__}")
        return bool(wrapped.get_raw().eq(real).all())


def get_framework_op(name: str) -> FrameworkOpBase:
    """Returns the framework "pt", "torch" or "pytorch". Raises NotImplementedError for any other name."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'Unknown framework name: "{name}"; fst loads for PyTorch, whose name is "pt"')
    return FrameworkOpBase()
