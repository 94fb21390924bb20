"""Indexing a slice gives what safetensors gives, value for value and error for error, and reads what it needs."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from rawfile import assert_same, random_raw, write

TENSORS = {
    "scalar": random_raw("F32", ()),
    "vector": random_raw("F64", (11,)),
    "matrix": random_raw("BF16", (6, 9)),
    "cube": random_raw("F32", (4, 5, 6)),
    "deep": random_raw("U8", (3, 1, 4, 2, 5)),
    "complex": random_raw("C64", (5, 3)),
    "no rows": random_raw("F16", (0, 4)),
    "no columns": random_raw("I32", (4, 0, 3)),
}
# The dtypes that NumPy has.
NUMPY_TENSORS = sorted(TENSORS.keys() - {"matrix"})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("slices") / "slices.safetensors", TENSORS, align=1)


def outcome(open_file: Any, path: Path, framework: str, name: str, index: Any) -> Any:
    """What indexing gives, or the class of what it raises."""
    with open_file(path, framework) as file, warnings.catch_warnings():
        # PyTorch warns of indices that it will understand in another way one day.
        warnings.simplefilter("ignore")
        try:
            return file.get_slice(name)[index]
        except Exception as error:
            return type(error)


BOUNDS = st.none() | st.integers(-12, 12)
NUMBERS = st.integers(-7, 7)
SLICES = st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(-1, 4))
LISTS = st.lists(st.integers(-3, 3), max_size=5)
MASKS = st.lists(st.booleans(), max_size=5)
ITEMS = st.one_of(
    SLICES,
    NUMBERS,
    st.just(...),
    LISTS,
    st.none(),
    NUMBERS.map(np.int64),
    NUMBERS.map(torch.tensor),
    LISTS.map(lambda values: torch.tensor(values, dtype=torch.int64)),
    LISTS.map(lambda values: np.array(values, dtype=np.int32)),
    st.builds(range, st.integers(0, 3)),
    st.booleans(),
    MASKS.map(lambda values: torch.tensor(values, dtype=torch.bool)),
    st.lists(LISTS, max_size=2),
    st.floats(-2, 2),
    st.text(max_size=1),
)
# Most indices of people are slices and ints.
INDICES = (
    ITEMS | st.lists(SLICES | NUMBERS | st.just(...), max_size=5).map(tuple) | st.lists(ITEMS, max_size=4).map(tuple)
)


@given(name=st.sampled_from(list(TENSORS)), index=INDICES)
def test_pytorch_as_safetensors(path, name, index):
    theirs = outcome(safetensors.safe_open, path, "pt", name, index)
    ours = outcome(fst.safe_open, path, "pt", name, index)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert_same(ours, theirs)


@given(name=st.sampled_from(NUMPY_TENSORS), index=INDICES)
def test_numpy_as_safetensors(path, name, index):
    theirs = outcome(safetensors.safe_open, path, "np", name, index)
    ours = outcome(fst.safe_open, path, "np", name, index)
    if not isinstance(theirs, type):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    elif not isinstance(ours, type):
        # Slices may reach past the ends, which safetensors refuses; then they are what they are in Python.
        whole = TENSORS[name].tensor().numpy()
        assert (ours.dtype, ours.shape) == (whole.dtype, whole[index].shape)
        assert ours.tobytes() == whole[index].tobytes()
    elif theirs not in (OverflowError, SystemError):
        # Those are not meant as answers: a bound was negative, or the end before the start.
        assert issubclass(ours, theirs)
