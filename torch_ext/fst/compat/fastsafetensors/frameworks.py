"""Wrapper of PyTorch tensors, and names of PyTorch."""

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

    def to(self, device: DeviceLike | None = None, dtype: DTypeLike = DType.AUTO) -> "TensorBase":
        """Converts the tensor to a device and a dtype. Copies only if one of them differs."""
        target = self._raw.device if device is None else as_device(device).as_str()
        return TensorBase(self._raw.to(device=target, dtype=as_torch_dtype(dtype)))

    def detach(self) -> "TensorBase":
        """Detaches the tensor from autograd, as `Tensor.detach`."""
        return TensorBase(self._raw.detach())

    def view(self, dtype: DTypeLike) -> "TensorBase":
        """Reinterprets the bytes as another dtype. AUTO returns the tensor itself."""
        torch_dtype = as_torch_dtype(dtype)
        return self if torch_dtype is None else TensorBase(self._raw.view(torch_dtype))

    def __repr__(self) -> str:
        return f"TensorBase({self._raw!r})"


def check_framework(name: str) -> None:
    """Raises NotImplementedError for any name other than "pt", "torch" and "pytorch"."""
    if name not in ("pt", "torch", "pytorch"):
        raise NotImplementedError(f'Unknown framework name: "{name}"; fst loads for PyTorch, whose name is "pt"')
