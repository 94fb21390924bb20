"""Maps PyTorch dtypes to ScalarType numbers and to names in safetensors headers.

rust/dtype.rs and rust/format/layout.rs decide; tests/python/core/test_dtypes.py compares.
"""

from collections.abc import Sequence

import torch

from fst._core.dtype_names import CASTABLE as CASTABLE_NAMES
from fst._core.dtype_names import HEADER_NAMES, full_name

# The values of c10::ScalarType, which operators take in lists.
SCALAR_TYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
    torch.float8_e8m0fnu: 44,
    torch.float4_e2m1fn_x2: 45,
}

DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in SCALAR_TYPES.items()}

# Names in headers, in the order in which tensors are stored in a new file.
NAMES: dict[torch.dtype, str] = {getattr(torch, name): header for name, header in HEADER_NAMES.items()}

TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

# Stored dtypes that loads and `scatter` cast if they are given a `dtype`.
CASTABLE: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in CASTABLE_NAMES)

# Header name of the dtype of which PyTorch packs two numbers into each element.
PACKED = "F4"


def dtype_named(name: object) -> torch.dtype | None:
    """Returns the dtype that PyTorch, NumPy, a header or people call by this name, or None."""
    found = getattr(torch, full_name(str(name)), None)
    return found if isinstance(found, torch.dtype) else None


def shape_in_torch(name: str, shape: Sequence[int]) -> list[int]:
    """Returns the shape of the PyTorch tensor for a dtype name and a shape in a header."""
    return [*shape[:-1], shape[-1] // 2] if name == PACKED else list(shape)
