"""Test inputs for casts.

Narrow dtypes get every bit pattern. Wide dtypes get patterns around rounding ties, overflow and special values.
"""

import functools

import torch

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]
# Alignments and targets are independent: every alignment with one target, every target with one alignment.
SHIFTS_AND_TARGETS = [(shift, torch.bfloat16) for shift in range(8)] + [
    (3, target) for target in FLOATS if target != torch.bfloat16
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A multiple of PyTorch's vector length on any CPU. PyTorch casts the remaining elements in scalar loops.
VECTOR_ELEMENTS = 64


# Casts of too large numbers to F8_E4M3 give NaN in the reference PyTorch, and 448 in later releases.
E4M3_SATURATES = not torch.tensor(1e4).to(torch.float8_e4m3fn).isnan().item()


@functools.cache
def patterns(dtype):
    """Returns the patterns of a dtype, a whole number of vectors. The tensor is cached and must not be changed."""
    bits = _WIDE[dtype.itemsize](dtype) if dtype.itemsize > 2 else _every_pattern(dtype.itemsize)
    if dtype == torch.bool:
        bits = bits.clamp(max=1)
    return bits[: len(bits) // VECTOR_ELEMENTS * VECTOR_ELEMENTS].view(dtype)


def _every_pattern(bytes_each):
    return torch.arange(256**bytes_each, dtype=torch.int32).to(_BITS[bytes_each])


def _random(bits):
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, (1 << 16,), generator=generator)


def _mantissas(digits):
    """Returns mantissas around rounding ties: the ends, powers of two, 1.5 times those, and the neighbours of each."""
    powers = [1 << digit for digit in range(digits)]
    ties = [*powers, *(3 << digit for digit in range(digits - 1)), 0, 1 << digits]
    return torch.tensor(sorted({(tie + near) % (1 << digits) for tie in ties for near in (-1, 0, 1)}))


def _bits_of_32(_dtype):
    heads = torch.arange(512) << 23
    return torch.cat([(heads[:, None] + _mantissas(23)).flatten(), _random(32)]).to(torch.int32)


def _bits_of_64(dtype):
    whole = torch.cat([torch.arange(-70000, 70000)] + [_mantissas(63) >> shift for shift in range(40)])
    random = _random(64)
    if not dtype.is_floating_point:
        return torch.cat([whole, -whole, random])
    heads = torch.arange(4096) << 52
    near_f32 = _bits_of_32(None).view(torch.float32).double().view(torch.int64)
    # Numbers one step from a float32 expose double rounding.
    beside = [near_f32 + step for step in (-1, 0, 1, 1 << 28, (1 << 28) - 1, (1 << 28) + 1)]
    return torch.cat([(heads[:, None] + _mantissas(52)).flatten(), *beside, whole.double().view(torch.int64), random])


_WIDE = {4: _bits_of_32, 8: _bits_of_64}


def cast_by_pytorch(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the result of `tensor.to(dtype)` in the reference PyTorch."""
    cast = tensor.to(dtype).resolve_neg()
    if dtype != torch.float8_e4m3fn or not E4M3_SATURATES or tensor.dtype == dtype:
        return cast
    # Numbers up to 464, halfway to the next number, round to 448.
    values = tensor.resolve_neg().to(torch.float32)
    nan = torch.where(values < 0, 0xFF, 0x7F).to(torch.uint8)
    return torch.where(values.abs() > 464, nan, cast.view(torch.uint8)).view(dtype)
