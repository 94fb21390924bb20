"""`get_slice`: equality with safetensors for results and errors, and bytes read."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fst
from fst._core.checkpoint import Checkpoint
from fst._core.memory import Memory
from procfs import SLACK_BYTES, read_bytes, storage_bytes
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
# Dtypes that NumPy supports.
NUMPY_TENSORS = sorted(TENSORS.keys() - {"matrix"})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("slices") / "slices.safetensors", TENSORS, align=1)


def outcome(open_file: Any, path: Path, framework: str, name: str, index: Any) -> Any:
    """Returns the result of indexing, or the class of its exception."""
    with open_file(path, framework) as file, warnings.catch_warnings():
        # PyTorch warns about indices whose meaning will change.
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
DTYPES = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES += ["bool", "float16", "float32", "float64"]
# Tensors and arrays of every dtype: 0-dimensional, empty, as long as a dimension of a tensor, or with two dimensions.
VALUES = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=6) | st.just([[0, 1], [1, 0]])
ARRAYS = st.builds(lambda values, dtype: np.array(values, dtype=dtype), VALUES, st.sampled_from(DTYPES))
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
    ARRAYS,
    ARRAYS.map(torch.from_numpy),
    ARRAYS.map(lambda array: array.tolist()),
    ARRAYS.filter(lambda array: array.ndim == 0).map(lambda array: array[()]),
    st.lists(ARRAYS.map(torch.from_numpy), max_size=2),
    st.builds(range, st.integers(0, 3)),
    st.booleans(),
    MASKS.map(lambda values: torch.tensor(values, dtype=torch.bool)),
    st.lists(LISTS, max_size=2),
    st.floats(-2, 2),
    st.text(max_size=1),
)
# Most indices in programs are slices and ints.
INDICES = (
    ITEMS | st.lists(SLICES | NUMBERS | st.just(...), max_size=5).map(tuple) | st.lists(ITEMS, max_size=4).map(tuple)
)


@given(name=st.sampled_from(list(TENSORS)), index=INDICES)
@example(name="matrix", index=torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.uint8))
@example(name="matrix", index=(slice(None), np.array([1, 0, 1] * 3, dtype=np.uint8)))
@example(name="vector", index=torch.tensor(1, dtype=torch.uint8))
@example(name="matrix", index=torch.tensor([1, 0], dtype=torch.int8))
@example(name="matrix", index=torch.tensor([1, 0], dtype=torch.int16))
@example(name="matrix", index=torch.tensor([]))
@example(name="matrix", index=np.array([]))
@example(name="matrix", index=[True, False] * 3)
def test_pytorch_matches_safetensors(path, name, index):
    theirs = outcome(safetensors.safe_open, path, "pt", name, index)
    ours = outcome(fst.safe_open, path, "pt", name, index)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert_same(ours, theirs)


@given(name=st.sampled_from(NUMPY_TENSORS), index=INDICES)
def test_numpy_matches_safetensors(path, name, index):
    theirs = outcome(safetensors.safe_open, path, "np", name, index)
    ours = outcome(fst.safe_open, path, "np", name, index)
    if not isinstance(theirs, type):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    elif not isinstance(ours, type):
        # safetensors refuses slices past the ends. fst treats them as Python does. Both take a bool for an int.
        whole = TENSORS[name].tensor().numpy()
        items = index if isinstance(index, tuple) else (index,)
        index = tuple(int(item) if isinstance(item, bool) else item for item in items)
        assert (ours.dtype, ours.shape) == (whole.dtype, whole[index].shape)
        assert ours.tobytes() == whole[index].tobytes()
    elif theirs not in (OverflowError, SystemError):
        # safetensors raises these unintentionally, for negative bounds and reversed slices.
        assert issubclass(ours, theirs)


INDEXED = [
    (slice(None), slice(2, 5)),
    (slice(None, None, 2), slice(1, 8, 3)),
    (-1, ...),
    (..., 3),
    slice(1, 5),
    (slice(1, 4), None, [7, 0, 0, 3]),
    ([4, 1, 2], slice(None, None, 4)),
    ([0, 5], [1, 2]),
    (torch.tensor([[True] * 9] * 6),),
]


@pytest.mark.usefixtures("reader_and_chunks")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("index", INDEXED, ids=str)
def test_indices_with_each_reader(path, index, device):
    with fst.safe_open(path, device=device) as file:
        part = file.get_slice("matrix")[index]
        assert part.device.type == device
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes
        assert_same(part, TENSORS["matrix"].tensor()[index])


def test_f4(tmp_path):
    raw = random_raw("F4", (4, 6))
    path = write(tmp_path / "packed.safetensors", {"x": raw})
    with fst.safe_open(path) as file:
        part = file.get_slice("x")
        # The shape is the file's, the index applies to PyTorch's tensor. safetensors does not slice F4.
        assert part.get_shape() == [4, 6]
        for index in (..., (slice(None), 2), (slice(None, None, 2), slice(1, 3))):
            assert_same(part[index], raw.tensor()[index])


ROWS, ROW_BYTES = 512, 64 << 10


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write(tmp_path_factory.mktemp("large") / "large.safetensors", {"w": random_raw("U8", (ROWS, ROW_BYTES))})


@pytest.mark.parametrize(
    ("index", "most_bytes"),
    [
        ((slice(None), slice(30_000, 40_000)), ROWS * 10_000),
        ((slice(10, 500, 7), ...), 70 * ROW_BYTES),
        ((slice(10, 500, 7), slice(30_000, 40_000)), 70 * 10_000),
        # A step within a row reads from the first element to the last.
        ((slice(0, 20, 2), slice(30_000, 40_000, 2)), 10 * 10_000),
        ((5, 6), 1),
        ([3, 500, 3], 2 * ROW_BYTES),
        ((slice(None), [60_000]), ROWS),
        (slice(0, 0), 0),
        (600, 0),
        ((0, 0, 0), 0),
    ],
    ids=str,
)
def test_read_bytes(large, monkeypatch, index, most_bytes):
    monkeypatch.setenv("FST_READER", "pread")
    with fst.safe_open(large) as file:
        part = file.get_slice("w")
        before = read_bytes()
        try:
            result = part[index]
        except IndexError:
            result = torch.empty(0)
        count = read_bytes() - before
        assert min(result.nbytes, most_bytes) <= count <= most_bytes + SLACK_BYTES


def test_small_results_are_copied(tmp_path, monkeypatch):
    """A system call copies a small tensor or region. Larger ones, and all that FST_READER=mmap reads, are mapped."""
    path = write(tmp_path / "m.safetensors", {"small": random_raw("F32", (8, 8)), "large": random_raw("U8", (9, 5000))})
    with fst.safe_open(path) as file:
        results = [file.get_tensor("small"), file.get_slice("small")[2:4], file.get_slice("large")[3]]
        assert not any(map(Memory.is_mapped, results))
        assert Memory.is_mapped(file.get_tensor("large"))
        monkeypatch.setenv("FST_READER", "mmap")
        assert Memory.is_mapped(file.get_tensor("small"))
        with open(path, "r+b") as stored:
            stored.truncate(path.stat().st_size - 5000)
        monkeypatch.delenv("FST_READER")
        with pytest.raises(OSError, match=r'tensor "large".*ended'):
            file.get_slice("large")[8]


def test_small_tensors_in_file_order_are_read_ahead(tmp_path):
    tensors = {f"{index:03}": random_raw("U8", (8192,)) for index in range(100)}
    path = write(tmp_path / "m.safetensors", tensors)
    with fst.safe_open(path) as file:
        os.sync()
        with path.open() as stored:
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        counts = []
        for name in file.keys():  # noqa: SIM118
            before = storage_bytes()
            file.get_tensor(name)
            counts.append(storage_bytes() - before)
    if counts[0] == 0:
        pytest.skip("the file is in memory")
    assert sum(count > 0 for count in counts) <= 16 + 100 * 8 // 128 + 2


def test_calls_of_the_core(path, monkeypatch):
    """A result costs one call of the core. Names and metadata are kept, and a slice reads its header entry once."""
    with fst.safe_open(path) as file:
        file.keys(), file.metadata()
        calls = []
        method = Checkpoint._method
        monkeypatch.setattr(Checkpoint, "_method", lambda self, name: (calls.append(name), method(self, name))[1])
        part = file.get_slice("cube")
        file.keys(), file.offset_keys(), file.metadata(), part[...], file.get_tensor("cube")
        assert calls == ["load_region"] * 2
        part[1:3], part[:, 2:4], part[-1], part[[0, 3]], part.get_shape()
        assert calls[2:] == ["entry", *["load_region"] * 4]


def test_truncated_file_is_an_error(tmp_path, fork_python):
    """Copies and casts read the file. A copy out of a mapping, which the file no longer backs, ends the process."""
    program = """
import os, sys, torch, fst
from fst._checkpoint.batched import have_equal_bits
from fst._checkpoint.checkpoint import OpenCheckpoint

file, checkpoint = fst.safe_open(sys.argv[1]), OpenCheckpoint(sys.argv[1])
mapped = file.get_tensor("a"), checkpoint.load_tensors(["a"], torch.device("cpu"))
length = os.path.getsize(sys.argv[1]) - 1_000_000
os.truncate(sys.argv[1], length)
last = [row in (0, 999) for row in range(1000)]
for copy in (
    lambda: file.get_slice("b")[[0, 999], :],
    lambda: file.get_slice("b")[:, ::2],
    lambda: file.get_slice("b")[torch.tensor(last)],
    lambda: checkpoint.load_tensors(["b"], torch.device("cpu"), torch.float16),
    lambda: checkpoint.load_into(["b"], [torch.empty(1000, 1000, dtype=torch.int64)]),
    lambda: have_equal_bits(checkpoint, ["b", "b"]),
    lambda: checkpoint.read("b"),
):
    try:
        copy()
    except OSError as error:
        assert sys.argv[1] in str(error) and 'tensor "b"' in str(error) and "byte " in str(error), error
        print("an error")
"""
    for reader in ("auto", "mmap"):
        path = write(tmp_path / "m.safetensors", {name: random_raw("F32", (1000, 1000)) for name in "ab"})
        assert fork_python(program, str(path), FST_READER=reader) == 7 * "an error\n"
