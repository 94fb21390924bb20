"""`fst.load_slices` and `fst.load_boxes`: equality with indexing, argument checks and bytes read."""

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from rawfile import CASTABLE_DTYPES, assert_same, assert_same_numbers, random_raw, write
from suite import DEVICES

TENSORS = {
    "vector": random_raw("F32", (30_000,)),
    "matrix": random_raw("BF16", (300, 70)),
    "wide": random_raw("F64", (3, 9000)),
    "cube": random_raw("U8", (17, 1, 400)),
    "deep": random_raw("I16", (5, 6, 7, 8, 9)),
    "complex": random_raw("C64", (41, 43)),
    "packed": random_raw("F4", (33, 5, 64)),
    "no rows": random_raw("F16", (0, 4)),
    "no columns": random_raw("F32", (4, 0, 3)),
    "scalar": random_raw("F32", ()),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("slices") / "slices.safetensors", TENSORS, align=1)


DTYPES = st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32, torch.float64])


def assert_part(tensor: torch.Tensor, name: str, stored: torch.Tensor, dtype: torch.dtype | None) -> None:
    assert tensor.is_contiguous()
    assert tensor.device == stored.device
    if dtype is not None and TENSORS[name].dtype in CASTABLE_DTYPES:
        assert_same_numbers(tensor, stored.to(dtype))
    else:
        assert_same(tensor, stored)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, list[tuple[int, int, int]]]:
    """Draws the name of a tensor, and a valid start, length and step for each dimension."""
    name = draw(st.sampled_from(list(TENSORS)))
    spans = []
    for size in TENSORS[name].torch_shape:
        start, step = draw(st.integers(0, size)), draw(st.integers(1, 5))
        spans.append((start, draw(st.integers(0, len(range(start, size, step)))), step))
    return name, spans


def index_of(spans: list[tuple[int, int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length * step, step) for start, length, step in spans)


@pytest.mark.usefixtures("reader_and_chunks")
@pytest.mark.parametrize("device", DEVICES)
@given(chosen=st.lists(boxes(), min_size=1, max_size=8), dtype=DTYPES, data=st.data())
def test_parts_match_indexing(path, device, chosen, dtype, data):
    loaded = fst.load_boxes(path, *(list(column) for column in zip(*chosen, strict=True)), device, dtype=dtype)
    for tensor, (name, spans) in zip(loaded, chosen, strict=True):
        assert_part(tensor, name, TENSORS[name].tensor()[index_of(spans)].to(device), dtype)
    # Slices of one dimension of each.
    slices = []
    for name, spans in chosen:
        if spans:
            dim = data.draw(st.integers(-len(spans), len(spans) - 1))
            slices.append((name, dim, *spans[dim][:2]))
    loaded = fst.load_slices(path, *map(list, zip(*slices, strict=True)), device, dtype=dtype) if slices else []
    for tensor, (name, *where) in zip(loaded, slices, strict=True):
        assert_part(tensor, name, TENSORS[name].tensor().narrow(*where).to(device), dtype)


def test_columns_of_a_large_matrix(tmp_path):
    """Rows of whole cache lines bypass the caches, and others do not."""
    matrix = torch.randn(700, 1024)
    safetensors.torch.save_file({"matrix": matrix}, tmp_path / "m.safetensors")
    for start, length in ((0, 512), (100, 512), (1, 512), (7, 493), (960, 64)):
        (loaded,) = fst.load_slices(tmp_path / "m.safetensors", ["matrix"], [1], [start], [length])
        assert_same(loaded, matrix[:, start : start + length])


def test_invalid_slices(path):
    """tests/rust/plan.rs, core/test_mistakes.py and core/test_hostile_numbers.py have others."""
    for name, dim, start, length in (("packed", -1, 0, 33), ("scalar", -1, 0, 1), ("matrix", 0, 1, 2**63 - 1)):
        with pytest.raises(ValueError, match=f'{path}: tensor "{name}"') as raised:
            fst.load_slices(path, ["vector", name], [0, dim], [0, start], [1, length])
        assert not isinstance(raised.value, fst.SafetensorError)
    with pytest.raises(ValueError, match="1 names, but 0 boxes"):
        fst.load_boxes(path, ["matrix"], [])
