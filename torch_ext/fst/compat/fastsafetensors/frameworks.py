"""Wrapper of PyTorch tensors, and PyTorch as an argument."""

from typing import Any

from torch import Tensor

from fst._core.dtypes import shape_in_header
from fst.compat.fastsafetensors.st_types import (
    Device,
    DeviceLike,
    DType,
    DTypeLike,
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

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self._raw.data_ptr()

    def to(self, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO) -> "TensorBase":
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

    def view(self, dtype: DTypeLike) -> "TensorBase":
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


class FrameworkOpBase:
    """PyTorch, as an argument of functions that support several frameworks."""

    def get_name(self) -> str:
        """Returns the name of the framework."""
        return "pytorch"

    def get_device_ptr_align(self) -> int:
        """Returns the alignment of pointers that kernels on GPUs expect, in bytes."""
        return 16


def get_framework_op(name: str) -> FrameworkOpBase:
    """Returns the framework "pt", "torch" or "pytorch". Raises NotImplementedError for any other name."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'Unknown framework name: "{name}"; fst loads for PyTorch, whose name is "pt"')
    return FrameworkOpBase()
