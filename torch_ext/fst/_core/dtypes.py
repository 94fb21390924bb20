"""Maps PyTorch dtypes to ScalarType numbers and to names in safetensors headers.

rust/dtype.rs and rust/format/layout.rs decide; tests/python/core/test_dtypes.py compares.
"""

from collections.abc import Sequence

import torch

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

# Names in headers, in the order in which tensors are stored in a new file. Wide dtypes come first, so that all tensors
# are aligned.
NAMES: dict[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float4_e2m1fn_x2: "F4",
    torch.bool: "BOOL",
}

TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

# Usual short names.
_SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# Stored dtypes that loads and `scatter` cast if they are given a `dtype`.
CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Header name of the dtype of which PyTorch packs two numbers into each element.
PACKED = "F4"


def dtype_named(name: object) -> torch.dtype | None:
    """Returns the dtype that PyTorch, NumPy, a header or people call by this name, or None."""
    name = str(name).removeprefix("torch.")
    found = TORCH_DTYPES.get(name, _SHORT.get(name, getattr(torch, name, None)))
    return found if isinstance(found, torch.dtype) else None


def shape_in_torch(name: str, shape: Sequence[int]) -> list[int]:
    """Returns the shape of the PyTorch tensor for a dtype name and a shape in a header."""
    return [*shape[:-1], shape[-1] // 2] if name == PACKED else list(shape)
