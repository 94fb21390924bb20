"""Python's dtype tables, compared with the library and with PyTorch."""

import json

import pytest
import torch

import fst
from fst._core.dtypes import CASTABLE, NAMES, SCALAR_TYPES, shape_in_header, shape_in_torch
from rawfile import DTYPES, random_raw


def header_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


@pytest.fixture
def tensors():
    """A tensor of every dtype of the format, in reverse order."""
    return {name: random_raw(name, (2, 4)).tensor() for name in reversed(DTYPES)}


def test_numbers_are_pytorchs():
    numbers = {dtype: torch.ops.prim.dtype(torch.empty(0, dtype=dtype)) for dtype in SCALAR_TYPES}
    assert numbers == SCALAR_TYPES


def test_names_and_their_order_are_those_of_saved_files(tmp_path, tensors):
    path = tmp_path / "all.safetensors"
    fst.save_file(tensors, path)
    header = header_of(path)
    saved = {tensors[name].dtype: entry["dtype"] for name, entry in header.items()}
    assert list(saved.items()) == list(NAMES.items())
    assert set(NAMES.values()) == set(DTYPES)


def test_castable_dtypes_match_loads(tmp_path, tensors):
    fst.save_file(tensors, tmp_path / "all.safetensors")
    for target in (torch.float32, torch.float64):
        loaded = fst.load_file(tmp_path / "all.safetensors", dtype=target)
        cast = {tensors[name].dtype for name, tensor in loaded.items() if tensor.dtype != tensors[name].dtype}
        assert cast == {*CASTABLE} - {target}


def test_shapes_in_headers_and_in_pytorch(tmp_path, tensors):
    path = tmp_path / "all.safetensors"
    fst.save_file(tensors, path)
    for name, entry in header_of(path).items():
        assert shape_in_torch(name, entry["shape"]) == list(tensors[name].shape)
        assert shape_in_header(name, tensors[name].shape) == entry["shape"]
