"""`fst.torch` and `fst.numpy`: the same tests for them and for safetensors.torch and safetensors.numpy."""

import importlib
import inspect
import itertools
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fst
import fst.numpy
import fst.torch
from fst._save.aliasing import alias_groups
from rawfile import DTYPES, assert_all_same, random_raw

# Dtypes of both NumPy and the format.
NUMPY_DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]


def every_dtype():
    return {f"{dtype} {shape}": random_raw(dtype, shape).tensor() for dtype in DTYPES for shape in [(3, 4), (0, 2)]}


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_functions_and_signatures_match(name):
    theirs, ours = importlib.import_module(f"safetensors.{name}"), importlib.import_module(f"fst.{name}")
    functions = {
        name: function
        for name, function in vars(theirs).items()
        if inspect.isfunction(function) and function.__module__ == theirs.__name__ and not name.startswith("_")
    }
    assert set(ours.__all__) >= {*functions, "safe_open"}
    assert ours.SafetensorError is safetensors.SafetensorError
    assert issubclass(fst.SafetensorError, safetensors.SafetensorError)
    for name, function in functions.items():
        signatures = [inspect.signature(each).parameters.values() for each in (function, getattr(ours, name))]
        expected, actual = ([(p.name, p.kind, p.default) for p in each] for each in signatures)
        assert actual == expected, name


# fst.torch


def test_files_are_identical(tmp_path):
    tensors = every_dtype() | {'é"\\/\t\u2028\x01\x7f😀\b\f': torch.ones(()), "": torch.ones(1), "z": torch.ones(3)}
    for metadata in (None, {}, {"é": 'a\n"\u2028\x7f'}):
        expected = safetensors.torch.save(tensors, metadata)
        assert fst.torch.save(tensors, metadata) == expected
        safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
        fst.torch.save_file(tensors, tmp_path / "ours", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes() == expected
    for backend in ("mmap", "pread"):
        assert_all_same(fst.torch.load_file(str(tmp_path / "theirs"), "cpu", backend=backend), tensors)
    # Metadata is sorted. The order of safetensors varies between saves.
    metadata = {key: key for key in "zéaA😀"}
    saved = fst.torch.save({"a": torch.ones(1)}, metadata)
    header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
    assert list(header["__metadata__"]) == sorted(metadata)
    fst.torch.save_file({"a": torch.ones(1)}, tmp_path / "m", metadata)
    assert (tmp_path / "m").read_bytes() == saved


@pytest.mark.usefixtures("reader_and_chunks")
def test_tensors_from_bytes_are_independent():
    saved = fst.torch.save(every_dtype())
    first, second = fst.torch.load(saved), fst.torch.load(saved)
    for tensor in first.values():
        tensor.view(-1).view(torch.uint8).zero_()
    assert_all_same(second, every_dtype())
    assert_all_same(fst.torch.load(saved), second)


SAVED = {"a": torch.ones(1)}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_differences_from_safetensors(tmp_path):
    """safetensors raises other errors here, writes files that cannot be read, or values before conjugation."""
    with pytest.raises(fst.SafetensorError, match=r"^data: byte 0: ") as raised:
        fst.torch.load(b"123")
    assert "/proc" not in str(raised.value)
    fst.save_file(SAVED, tmp_path / "key", encryption_key=fst.EncryptionKey.from_bytes(bytes(32)))
    with pytest.raises(fst.SafetensorError, match=r"^data: the bytes are those of an encrypted file"):
        fst.torch.load((tmp_path / "key").read_bytes())
    with pytest.raises(fst.SafetensorError, match="nowhere") as raised:
        fst.torch.save_file(SAVED, tmp_path / "nowhere" / "m")
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    refused = {"a": torch.zeros(1, dtype=torch.complex32)}, {"a": torch.zeros(1, dtype=torch.complex128)}
    for tensors in (*refused, {"__metadata__": torch.zeros(1)}):
        for save in (fst.torch.save, lambda tensors: fst.torch.save_file(tensors, tmp_path / "m")):
            with pytest.raises(fst.SafetensorError, match=f'"{next(iter(tensors))}"'):
                save(tensors)
    tensors, expected = {"a": torch.tensor([1 + 2j, 3 - 4j]).conj()}, {"a": torch.tensor([1 - 2j, 3 + 4j])}
    assert_all_same(fst.torch.load(fst.torch.save(tensors)), expected)
    fst.torch.save_file(tensors, tmp_path / "m")
    assert_all_same(fst.torch.load_file(tmp_path / "m"), expected)


@pytest.mark.gpu
def test_gpu(tmp_path):
    # PyTorch supports few operations on F4 on a GPU.
    tensors = {name: tensor for name, tensor in every_dtype().items() if not name.startswith("F4 ")}
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert fst.torch.save(there) == safetensors.torch.save(tensors)
    fst.torch.save_file(there, tmp_path / "m.safetensors")
    for device in ("cuda", "cuda:0", 0):
        loaded = fst.torch.load_file(tmp_path / "m.safetensors", device=device)
        assert {tensor.device for tensor in loaded.values()} == {torch.device("cuda", 0)}
        assert_all_same(loaded, tensors)


# Modules and tensors that share memory.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


class Sliced(nn.Module):
    """A parameter and overlapping buffers that are views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(10))
        self.register_buffer("first", self.whole.data[:4])
        self.register_buffer("second", self.whole.data[5:7])
        self.register_buffer("within", self.whole.data[6:7])


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4).T), nn.Parameter(torch.randn(2))


class Repeated(nn.Module):
    """Several names for one tensor, and an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
        self.register_buffer("empty", torch.empty(0))


MODELS = [Tied, Sliced, Transposed, Repeated]


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("model", MODELS)
def test_models_are_interchangeable(tmp_path, model):
    saved = model()
    for metadata in (None, {"head.weight": "mine", "format": "pt"}):
        headers = []
        for module in (safetensors.torch, fst.torch):
            # safetensors modifies the metadata of the caller.
            given = None if metadata is None else dict(metadata)
            module.save_model(saved, str(tmp_path / "m"), metadata=given)
            assert given == metadata or module is safetensors.torch
            with safetensors.safe_open(tmp_path / "m", framework="pt") as file:
                headers.append((file.keys(), file.metadata()))
            loaded = model()
            identities = {name: id(parameter) for name, parameter in loaded.named_parameters()}
            assert fst.torch.load_model(loaded, tmp_path / "m") == (set(), [])
            assert_all_same(state_of(loaded), state_of(saved))
            assert {name: id(parameter) for name, parameter in loaded.named_parameters()} == identities
        assert headers[0] == headers[1]


def test_other_name_of_tied_parameter(tmp_path):
    """The file has the other name of a tied parameter."""
    saved, loaded = Tied(), Tied()
    state = state_of(saved)
    del state["embedding.weight"]
    fst.torch.save_file(state, tmp_path / "m")
    assert fst.torch.load_model(loaded, tmp_path / "m") == (set(), [])
    assert_all_same(state_of(loaded), state_of(saved))
    assert loaded.head.weight is loaded.embedding.weight


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        (["head.weight", "body.bias"], []),
        (["head.weight"], ["other", "another"]),
        (["head.weight", "body.bias"], ["other", "another"]),
        ([], []),
    ],
    ids=["missing", "unexpected", "both", "both names of one"],
)
def test_missing_and_unexpected_names(tmp_path, removed, added):
    state = {name: tensor for name, tensor in state_of(Tied()).items() if name not in removed}
    safetensors.torch.save_file(state | {name: torch.ones(1) for name in added}, tmp_path / "m")
    results = []
    for module in (safetensors.torch, fst.torch):
        missing, unexpected = module.load_model(Tied(), tmp_path / "m", strict=False)
        with pytest.raises(RuntimeError, match="key") as raised:
            module.load_model(Tied(), tmp_path / "m")
        results.append((missing, sorted(unexpected), str(raised.value)))
    assert results[0] == results[1]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)),
        max_size=8,
    )
)
def test_groups_of_shared_tensors_match(views):
    storages = [torch.arange(8.0), torch.arange(8.0)]
    tensors = {f"t{number}": storages[which][begin:end] for number, (which, (begin, end)) in enumerate(views)}
    expected = safetensors.torch._find_shared_tensors(tensors)
    assert {frozenset(group) for group in alias_groups(tensors)} == {frozenset(group) for group in expected}
    assert sum(len(group) for group in alias_groups(tensors)) == len(tensors)
    for function in ("storage_ptr", "storage_size"):
        for tensor in tensors.values():
            assert getattr(fst.torch, function)(tensor) == getattr(safetensors.torch, function)(tensor)


# fst.numpy


def arrays():
    source = np.random.default_rng(0)
    made = {}
    for code, shape in itertools.product(NUMPY_DTYPES, [(), (3, 4), (0, 2)]):
        count = np.dtype(code).itemsize * int(np.prod(shape))
        raw = source.integers(0, 2 if code == "bool" else 256, count, dtype=np.uint8)
        made[f"{code} {shape}"] = raw.view(code).reshape(shape)
    return made


def assert_same_arrays(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name


def test_files_of_arrays_are_identical(tmp_path):
    for metadata in (None, {"a": "b"}):
        expected = safetensors.numpy.save(arrays(), metadata)
        assert fst.numpy.save(arrays(), metadata) == expected
        fst.numpy.save_file(arrays(), tmp_path / "m", metadata)
        assert (tmp_path / "m").read_bytes() == expected
    for backend in ("mmap", "pread"):
        loaded = fst.numpy.load_file(tmp_path / "m", backend=backend)
        assert_same_arrays(loaded, arrays())
    for array in loaded.values():
        array[...] = 0
    assert_same_arrays(fst.numpy.load(expected), arrays())
    assert_same_arrays(fst.numpy.load_file(str(tmp_path / "m")), arrays())


@pytest.mark.parametrize("module", [safetensors.numpy, fst.numpy], ids=["safetensors", "fst"])
def test_unusual_arrays(module, recwarn):
    read_only = np.arange(4.0)
    read_only.flags.writeable = False
    shared = np.arange(3)
    given_arrays = {
        "big-endian": np.arange(5, dtype=">i4"),
        "read-only": read_only,
        "one": shared,
        "again": shared,
        "a row": np.arange(6).reshape(2, 3)[1],
        "at an odd byte": np.frombuffer(bytes(range(9)), np.uint8, offset=1).view("<i4"),
    }
    loaded = module.load(module.save(given_arrays))
    expected = {name: np.array(array, array.dtype.newbyteorder("=")) for name, array in given_arrays.items()}
    assert_same_arrays(loaded, expected)
    assert list(recwarn) == []


@pytest.mark.parametrize("change", [np.transpose, lambda a: a[:, ::2], lambda a: a[::-1], lambda a: a[:, 1]])
def test_strided_arrays(tmp_path, change):
    """safetensors saves strided arrays in memory order."""
    array = change(np.arange(12).reshape(3, 4))
    assert_same_arrays(fst.numpy.load(fst.numpy.save({"a": array})), {"a": array})
    fst.numpy.save_file({"a": array}, tmp_path / "m")
    assert_same_arrays(fst.numpy.load_file(tmp_path / "m"), {"a": array})


def test_values_must_be_arrays():
    for tensors in ([np.zeros(1)], {"a": [1.0]}, {"a": torch.ones(1)}):
        with pytest.raises(TypeError):
            fst.numpy.save(tensors)


def test_bfloat16_without_ml_dtypes(fork_python, tmp_path):
    fst.torch.save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "m")
    program = """
import sys
sys.modules["ml_dtypes"] = None
import safetensors.numpy, fst.numpy
for module in (safetensors.numpy, fst.numpy):
    try:
        print(module.load_file(sys.argv[1]))
    except TypeError as error:
        print(error)
del sys.modules["ml_dtypes"]
print(fst.numpy.load_file(sys.argv[1]))
"""
    theirs, ours, imported = fork_python(program, str(tmp_path / "m")).splitlines()
    assert "bfloat16" in theirs
    assert "install ml_dtypes" in ours
    assert imported == "{'a': array([1, 1], dtype=bfloat16)}"


def test_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    expected = {name: np.arange(256).astype(np.uint8).view(getattr(ml_dtypes, name)) for name in names}
    saved = fst.numpy.save(expected)
    assert saved == safetensors.numpy.save(expected)
    assert_same_arrays(fst.numpy.load(saved), expected)
    fst.numpy.save_file(expected, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == saved
    assert_same_arrays(fst.numpy.load_file(tmp_path / "m"), expected)
    tensors = fst.torch.load_file(tmp_path / "m")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {name: getattr(torch, name) for name in names}
