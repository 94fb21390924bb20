"""PyTorch, and its tensors in the wrapping that some functions return."""

from typing import Any

import torch
from torch import Tensor

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
        shape = list(self._raw.shape)
        return [*shape[:-1], shape[-1] * 2] if self.dtype is DType.F4 else shape

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


class Framework:
    """What functions take to know that tensors are PyTorch's."""

    def get_name(self) -> str:
        """Its name."""
        return "pytorch"


def get_framework_op(name: str) -> Framework:
    """The framework of a name: "pt", "torch" or "pytorch". No other can be had."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'the framework "{name}" is not supported; fst loads for PyTorch, whose name is "pt"')
    return Framework()
