"""`fst.scatter`: results, casts and argument checks. test_graph.py has compiled programs."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from fst._core.dtypes import SCALAR_TYPES
from patterns import SHIFTS_AND_TARGETS, cast_by_pytorch, patterns
from rawfile import bits_of
from suite import DEVICES

CASTABLE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = sorted(SCALAR_TYPES, key=SCALAR_TYPES.get)


def expected_parts(raw, offsets, dtypes, shapes, dtype):
    """Yields the tensors that slicing, viewing and casting with PyTorch give."""
    for offset, stored, shape in zip(offsets, dtypes, shapes, strict=True):
        count = torch.Size(shape).numel()
        part = raw[offset : offset + count * stored.itemsize].clone().view(stored).view(shape)
        yield cast_by_pytorch(part, dtype) if dtype is not None and stored in CASTABLE else part


def assert_scatter(raw, offsets, dtypes, shapes, dtype=None):
    results = fst.scatter(raw, offsets, dtypes, shapes, dtype)
    expected = list(expected_parts(raw, offsets, dtypes, shapes, dtype))
    assert len(results) == len(expected)
    for result, part in zip(results, expected, strict=True):
        assert (result.shape, result.dtype, result.device) == (part.shape, part.dtype, part.device)
        assert result.is_contiguous()
        assert torch.equal(as_bytes(result), as_bytes(part))
    spans = sorted((result.data_ptr(), result.nbytes) for result in results if result.numel())
    assert all(begin + length <= after for (begin, length), (after, _) in pairwise(spans))
    return results


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


RAW = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def shapes_of(elements_max):
    return st.lists(st.integers(0, 5), max_size=4).filter(lambda shape: math.prod(shape) <= elements_max)


@st.composite
def layouts(draw):
    offsets, dtypes, shapes = [], [], []
    for _ in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(shapes_of(elements_max=len(RAW) // dtype.itemsize))
        bytes_needed = math.prod(shape) * dtype.itemsize
        offsets.append(draw(st.integers(0, len(RAW) - bytes_needed)))
        dtypes.append(dtype)
        shapes.append(shape)
    return offsets, dtypes, shapes


@pytest.mark.parametrize("device", DEVICES)
@given(layout=layouts())
def test_random_layouts(device, layout):
    assert_scatter(RAW.to(device), *layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shift", "target"), SHIFTS_AND_TARGETS)
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector loops here")
def test_casts_from_any_alignment(shift, target, device):
    parts = [patterns(dtype)[:65536] for dtype in CASTABLE]
    raw = torch.cat([torch.zeros(shift, dtype=torch.uint8), *map(as_bytes, parts)])
    ends = torch.tensor([part.nbytes for part in parts]).cumsum(0).tolist()
    offsets = [shift + begin for begin in [0, *ends[:-1]]]
    assert_scatter(raw.to(device), offsets, CASTABLE, [[64, len(part) // 64] for part in parts], target)


def test_only_wide_floats_are_cast():
    offsets = list(range(len(DTYPES)))
    results = assert_scatter(torch.ones(100, dtype=torch.uint8), offsets, DTYPES, [[2]] * len(DTYPES), torch.float64)
    cast = [dtype for dtype, result in zip(DTYPES, results, strict=True) if result.dtype != dtype]
    assert cast == [torch.float16, torch.float32, torch.bfloat16]


def test_results_are_independent():
    raw = RAW.clone()
    first, second = fst.scatter(raw, [3, 3], [torch.float32] * 2, [[4], [2, 2]])
    kept = bits_of(second)
    first.zero_()
    raw.zero_()
    assert bits_of(second) == kept
    assert first.untyped_storage().nbytes() == 16


def test_strided_bytes_and_empty_results():
    assert_scatter(RAW[1::3], [1], [torch.int32], [[3, 5]])
    assert fst.scatter(RAW, [], [], []) == []
    assert_scatter(RAW[:0], [0, 0], [torch.float32, torch.bool], [[0], [3, 0]])


F32, TWO = 6, [6, 6]
# Arguments of the operator: offsets, numbers of dtypes, sizes and ranks. A dtype is its number in PyTorch.
INVALID_ARGUMENTS = {
    "2 offsets, but 1 dtypes and 2 ranks": ([0, 4], TWO[:1], [1, 1], [1, 1]),
    "2 offsets, but 2 dtypes and 1 ranks": ([0, 4], TWO, [1], [1]),
    "tensor 1: .* needs 4 bytes from byte 4997 on, but `bytes` has 5000": ([0, 4997], TWO, [1, 1], [1, 1]),
    "tensor 0: .* from byte -1": ([-1], [F32], [1], [1]),
    "tensor 0: .* from byte 5001": ([5001], [F32], [0], [1]),
    "tensor 1: shape .* has a negative size": ([0, 0], TWO, [1, 3, -1], [1, 2]),
    "tensor 0: shape .* overflows a 64-bit size": ([0], [F32], [2**32, 2**32], [2]),
    "rank 3 exceeds the 2 sizes left of 2": ([0], [F32], [1, 1], [3]),
    "rank -1": ([0], [F32], [1], [-1]),
    "add up to 1, but there are 2 sizes": ([0], [F32], [1, 1], [1]),
} | {
    f"tensor 0: {number} is not the number of a dtype": ([0], [number], [1], [1])
    for number in (-1, 12, 21, 1000, 2**40)
}


def test_invalid_arguments():
    for message, arguments in INVALID_ARGUMENTS.items():
        with pytest.raises(ValueError, match=message):
            torch.ops.fst.scatter(RAW, *arguments)
    for raw in (RAW.view(50, 100), RAW.view(torch.int8), torch.ones(3)):
        with pytest.raises(ValueError, match="1-d uint8 tensor"):
            fst.scatter(raw, [0], [torch.bool], [[1]])
    with pytest.raises(ValueError, match="floating-point"):
        fst.scatter(RAW, [0], [torch.float32], [[1]], torch.int32)
