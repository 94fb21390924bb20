"""The numbers by which operators know dtypes in lists: the values of c10::ScalarType, which PyTorch keeps for ever."""

import torch

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

# What `dtype=` casts, in loads and in `scatter`.
CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
