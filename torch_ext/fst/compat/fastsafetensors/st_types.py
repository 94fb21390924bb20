"""Devices and dtypes of this package's functions."""

from dataclasses import dataclass
from enum import Enum

import torch

from fst._core.dtypes import NAMES, TORCH_DTYPES


class DeviceType(Enum):
    """Device types. "gpu" is a name of other frameworks, which PyTorch does not accept."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """Device with a type and an index. The index None is the current device of the type."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """Returns PyTorch's name of the device: "cpu", "cuda:0"."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> "Device":
        """Parses the name of a device. Raises ValueError if the name is not valid."""
        type_name, colon, index = s.partition(":")
        types = [member for member in DeviceType if member.value == type_name.lower()]
        if not types:
            raise ValueError(f"Unknown device type: {type_name}; expected one such as cpu or cuda")
        if colon and not index.isdecimal():
            raise ValueError(f'Invalid index: {index}; expected a number, as in "cuda:0"')
        return cls(types[0], int(index) if colon else None)


class DType(Enum):
    """Dtypes in headers. AUTO keeps the stored dtype."""

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


# Devices and dtypes that functions accept. An int is the index of a GPU.
DeviceLike = Device | torch.device | str | int
DTypeLike = DType | torch.dtype


def as_device(device: DeviceLike) -> Device:
    """Converts a device."""
    if isinstance(device, Device):
        return device
    return Device.from_str(f"cuda:{device}" if isinstance(device, int) else str(device))


def as_torch_dtype(dtype: DTypeLike) -> torch.dtype | None:
    """Returns the PyTorch dtype, or None for AUTO."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, DType):
        raise TypeError(f"dtype must be a DType or a torch.dtype, not {type(dtype).__name__}")
    if dtype is DType.AUTO:
        return None
    if dtype.value not in TORCH_DTYPES:
        raise NotImplementedError(f"PyTorch has no dtype for {dtype.value}")
    return TORCH_DTYPES[dtype.value]


def as_dtype(dtype: torch.dtype) -> DType:
    """Returns the dtype in headers of a PyTorch dtype."""
    if dtype not in NAMES:
        raise NotImplementedError(f"safetensors has no dtype for {dtype}")
    return DType(NAMES[dtype])
