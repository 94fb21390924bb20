"""Python's dtype tables, compared with the library and with PyTorch."""

import torch

import fst
from fst._core.dtypes import CASTABLE, NAMES, SCALAR_TYPES, shape_in_torch
from rawfile import DTYPES, random_raw
from saved import read_header


def test_numbers_are_pytorchs():
    numbers = {dtype: torch.ops.prim.dtype(torch.empty(0, dtype=dtype)) for dtype in SCALAR_TYPES}
    assert numbers == SCALAR_TYPES


def test_tables_are_those_of_saved_files(tmp_path):
    path = tmp_path / "all.safetensors"
    tensors = {name: random_raw(name, (2, 4)).tensor() for name in reversed(DTYPES)}
    fst.save_file(tensors, path)
    _, header = read_header(path)
    saved = {tensors[name].dtype: entry["dtype"] for name, entry in header.items()}
    assert list(saved.items()) == list(NAMES.items())
    assert set(NAMES.values()) == set(DTYPES)
    for name, entry in header.items():
        assert shape_in_torch(name, entry["shape"]) == list(tensors[name].shape)
    for target in (torch.float32, torch.float64):
        loaded = fst.load_file(path, dtype=target)
        cast = {tensors[name].dtype for name, tensor in loaded.items() if tensor.dtype != tensors[name].dtype}
        assert cast == {*CASTABLE} - {target}
