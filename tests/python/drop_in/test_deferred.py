"""Deferred tensors: recorded operators give the values that PyTorch gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.checkpoint import load_views_into
from fst._core.memory import Memory
from fst._deferred.dequantize import record_scaled
from fst._deferred.tensor import DeferredTensor, NotRecordedError, UnsavedTensor, load_deferred
from fst._deferred.view import Held, Stored, View
from rawfile import assert_same

CPU = torch.device("cpu")
# Sizes with many divisors, and a prime.
SIZES = st.sampled_from([1, 2, 3, 4, 6, 7, 12])
SHAPES = st.lists(SIZES, min_size=1, max_size=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# More elements than fst copies in place of mapping them.
LARGE = 1 << 15


def deferred(checkpoint, name):
    meta = checkpoint.tensors[name]
    return DeferredTensor(View(meta, Stored(meta, checkpoint, name)), CPU)


def stored(path, shapes, dtype=torch.float32):
    """Saves random tensors, and returns them with deferred ones."""
    tensors = {f"t{index}": torch.randn(shape).to(dtype) for index, shape in enumerate(shapes)}
    fst.save_file(tensors, path)
    checkpoint = OpenCheckpoint(path)
    return [*tensors.values()], [deferred(checkpoint, name) for name in tensors]


def split(length):
    """Strategy for two factors of a length."""
    return st.sampled_from([factor for factor in range(1, length + 1) if length % factor == 0])


def step(draw, tensor):
    """Draws an operator that a tensor supports, as a function."""
    dim = draw(st.integers(0, tensor.dim() - 1))
    length = tensor.shape[dim]
    begin = draw(st.integers(0, max(length - 1, 0)))
    inner = draw(split(max(length, 1)))
    order = draw(st.permutations(range(tensor.dim())))
    dtype = draw(st.sampled_from(DTYPES))
    folded = [*tensor.shape[:dim], length // inner, inner, *tensor.shape[dim + 1 :]]
    operators = {
        "permute": lambda value: value.permute(order),
        "narrow": lambda value: value.narrow(dim, begin, length - begin),
        "every second": lambda value: value[(slice(None),) * dim + (slice(begin, None, 2),)],
        "fold": lambda value: value.reshape(folded),
        "flatten": lambda value: value.reshape(-1),
        "contiguous": lambda value: value.contiguous(),
        "clone": lambda value: value.clone(),
        "cast": lambda value: value.to(dtype),
        "unsqueeze": lambda value: value.unsqueeze(dim),
        "last chunk": lambda value: torch.chunk(value, 2, dim)[-1],
        "twice": lambda value: torch.cat([value, value], dim),
        "stack": lambda value: torch.stack([value, value.clone(), value], dim),
        "expand": lambda value: value.unsqueeze(0).expand(2, *value.shape),
        "squeeze": lambda value: value.squeeze(dim),
        "stack of one": lambda value: torch.stack([value], dim),
    }
    if tensor.dim() > 1:
        operators["select"] = lambda value: value.select(dim, begin)
    return operators[draw(st.sampled_from([*operators]))]


def held(tensor, kind=DeferredTensor):
    meta = torch.empty_like(tensor, device="meta")
    return kind(View(meta, Held(meta, tensor), tensor), CPU)


@given(st.data())
def test_recorded_operators_give_the_same_values(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("deferred") / "model.safetensors"
    [expected], [found] = stored(path, [data.draw(SHAPES)], data.draw(st.sampled_from(DTYPES)))
    if data.draw(st.booleans()):
        found = held(expected, UnsavedTensor)
    for _ in range(data.draw(st.integers(1, 6))):
        if expected.numel() > 1 << 14 or not expected.dim():
            break
        operator = step(data.draw, expected)
        expected, found = operator(expected), operator(found)
        assert isinstance(found, DeferredTensor)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    [loaded] = load_deferred([found])
    assert_same(loaded, expected)


def test_views_of_several_checkpoints_and_of_memory(tmp_path):
    """One load fills a tensor with parts of files and of a tensor in memory, each rounded once."""
    (first, _), (found_first, _) = stored(tmp_path / "first.safetensors", [(4, 6), (2,)])
    (_, second), (_, found_second) = stored(tmp_path / "second.safetensors", [(3,), (4, 6)], torch.bfloat16)
    memory = torch.randn(4, 6)
    found_memory = held(memory)

    def joined(*tensors):
        return torch.cat([tensor.t().float() for tensor in tensors], 1)[1:].half().double()

    # The second half of a tensor begins inside its storage.
    [loaded] = load_deferred([joined(found_first, found_second, found_memory, found_second)])
    assert_same(loaded, joined(first, second, memory, second))


STRIDED = {
    "as_strided": lambda tensor: tensor.as_strided((3, 2), (1, 6)),
    "reshape": lambda tensor: tensor.reshape(3, 2, 4),
    "reshape_alias": lambda tensor: torch.ops.aten._reshape_alias(tensor, (3, 2, 4), (8, 4, 1)),
}


@pytest.mark.parametrize("view", STRIDED)
def test_strides_of_copies_in_memory(view):
    """A copy that was not made has other strides than its source."""
    memory = torch.randn(4, 6)
    [loaded] = load_deferred([STRIDED[view](held(memory, UnsavedTensor).t().contiguous())])
    assert_same(loaded, STRIDED[view](memory.t().contiguous()))


def test_views_outside_of_tensors_are_refused(tmp_path):
    stored(tmp_path / "model.safetensors", [(4, 6)])
    checkpoint = OpenCheckpoint(tmp_path / "model.safetensors")
    for views in ([[0, 1, [4, 6], [6, 1]]], [[1, 0, [2], [1]]], [[0, 0, [24, 2], [1, 1 << 62]]]):
        out = torch.zeros(views[0][2][:1])
        with pytest.raises(ValueError, match="tensor"):
            load_views_into([checkpoint], {"bases": [{"stored": 0}], "views": views}, [], [out])
        assert not out.any()


def test_other_operators_load_values(tmp_path):
    [expected], [found] = stored(tmp_path / "model.safetensors", [(4, 3)])
    assert torch.equal(found + 1, expected + 1)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert found.sum().item() == expected.sum().item()
    with pytest.raises(NotRecordedError, match="add_"):
        found.add_(1)


def test_views_of_stored_tensors_stay_mapped(tmp_path):
    _, [whole, turned, part, joined] = stored(tmp_path / "model.safetensors", [(2, LARGE)] * 4)
    loaded = load_deferred([whole, turned.t(), part[1], torch.cat([joined, joined])])
    assert [Memory.is_mapped(tensor) for tensor in loaded] == [True, True, True, False]


@pytest.mark.parametrize("shape", [[], [1], [1, 1, 1], [2, 3], [1, 2, 3], [4, 2, 3], [4], [4, 1, 1]])
def test_scales_of_several_matrices(tmp_path, shape):
    """Scales of one matrix, or one for each matrix, have the dims that they need."""
    codes = torch.randint(0, 127, (4, 8, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(shape)
    fst.save_file({"codes": codes, "scales": scales}, tmp_path / "model.safetensors")
    checkpoint = OpenCheckpoint(tmp_path / "model.safetensors")
    numbers = record_scaled(deferred(checkpoint, "codes"), deferred(checkpoint, "scales"), torch.bfloat16)
    cells = scales.view(-1, 1, 1) if len(shape) < 2 else scales
    factors = cells.repeat_interleave(8 // cells.shape[-2], -2).repeat_interleave(6 // cells.shape[-1], -1)
    expected = (codes.float() * factors).bfloat16()
    assert_same(load_deferred([numbers[1:, 3:7].float()])[0], expected[1:, 3:7].float())


FP8_VIEWS = {
    "whole": lambda value: value,
    "inside a block": lambda value: value[10:30],
    "columns": lambda value: value[:, 14:50],
    "copy": lambda value: value.clone(),
    "parts of two": lambda value: torch.cat([value[40:50], value[3:7]]),
    "stack": lambda value: torch.stack([value[:8], value[56:]]),
    "transposed": lambda value: value[:, 2:4].t(),
    "every second": lambda value: value[::2],
}


@pytest.mark.parametrize("view", FP8_VIEWS)
@pytest.mark.parametrize(("dtype", "block"), [(torch.float8_e4m3fn, (32, 32)), (torch.int8, (1, 32))])
def test_parts_of_codes_are_parts_of_the_numbers(tmp_path, dtype, block, view):
    codes = torch.randint(-60, 60, (64, 96), dtype=torch.int8).view(dtype)
    columns = 96 if dtype.is_floating_point else 192
    scales = torch.rand(64 // block[0], columns // block[1])
    fst.save_file({"codes": codes, "scales": scales}, tmp_path / "model.safetensors")
    checkpoint = OpenCheckpoint(tmp_path / "model.safetensors")
    whole = record_scaled(deferred(checkpoint, "codes"), deferred(checkpoint, "scales"), torch.bfloat16)
    [expected] = load_deferred([whole])
    part = record_scaled(FP8_VIEWS[view](deferred(checkpoint, "codes")), deferred(checkpoint, "scales"), torch.bfloat16)
    if dtype is torch.int8 and view in ("columns", "transposed"):
        # Columns of bytes are twice as many columns of numbers.
        assert part is None or view == "columns"
        expected = expected[:, 28:100]
    else:
        expected = FP8_VIEWS[view](expected)
    if part is not None:
        assert_same(load_deferred([part])[0], expected)
