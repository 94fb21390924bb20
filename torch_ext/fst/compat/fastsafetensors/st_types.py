"""Devices and dtypes, as the functions of this package take and give them."""

from dataclasses import dataclass
from enum import Enum

import torch

from fst._core.dtypes import NAMES


class DeviceType(Enum):
    """Where tensors can be. PyTorch has no "gpu", a name that other frameworks use."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device by kind and number; None is the current one of its kind."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """The name that PyTorch takes: "cpu", "cuda:0"."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> "Device":
        """The device with a name. Raises ValueError where there is none."""
        kind, colon, index = s.partition(":")
        known = [member for member in DeviceType if member.value == kind.lower()]
        if not known or (colon and not index.isdecimal()):
            raise ValueError(f'"{s}" is no device; expected a name such as "cpu", "cuda" or "cuda:0"')
        return cls(known[0], int(index) if colon else None)


class DType(Enum):
    """The dtypes of files. AUTO keeps what a file has."""

    BOOL = "BOOL"
    I8 = "I8"
    I16 = "I16"
    I32 = "I32"
    I64 = "I64"
    U8 = "U8"
    U16 = "U16"
    U32 = "U32"
    U64 = "U64"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    BF16 = "BF16"
    C64 = "C64"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F6_E3M2 = "F6_E3M2"
    F6_E2M3 = "F6_E2M3"
    F4 = "F4"
    AUTO = "AUTO"


_TORCH_DTYPES = {DType(name): dtype for dtype, name in NAMES.items()}
_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items()}


def as_device(device: Device | torch.device | str | int) -> Device:
    """Whatever names a device; an int is the index of a GPU."""
    if isinstance(device, Device):
        return device
    return Device.from_str(f"cuda:{device}" if isinstance(device, int) else str(device))


def as_torch_dtype(dtype: DType | torch.dtype) -> torch.dtype | None:
    """PyTorch's dtype; None for AUTO."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, DType):
        raise TypeError(f"dtype must be a DType or a torch.dtype, not {type(dtype).__name__}")
    if dtype is DType.AUTO:
        return None
    if dtype not in _TORCH_DTYPES:
        raise NotImplementedError(f"PyTorch has no dtype for {dtype.value}")
    return _TORCH_DTYPES[dtype]


def as_dtype(dtype: torch.dtype) -> DType:
    """The dtype of files that holds PyTorch's."""
    if dtype not in _DTYPES:
        raise NotImplementedError(f"files have no dtype for {dtype}")
    return _DTYPES[dtype]
