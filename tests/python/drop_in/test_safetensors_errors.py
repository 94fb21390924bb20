"""Errors of `fst.safe_open`, `fst.torch` and `fst.numpy` beside safetensors' errors for the same calls."""

import errno
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

import fst
import fst.numpy
import fst.torch
from rawfile import encode

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Files under relative paths, which messages contain."""
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"a": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(1.0)}, "m.safetensors")
    header = {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    (tmp_path / "f6.safetensors").write_bytes(encode(header, bytes(3)))
    for number, content in enumerate(MALFORMED):
        (tmp_path / f"malformed-{number}").write_bytes(content)


class Library:
    def __init__(self, package, modules):
        self.safe_open, self.torch, self.numpy = package.safe_open, modules.torch, modules.numpy

    def open(self, path="m.safetensors", framework="pt", **kwargs):
        return self.safe_open(path, framework, **kwargs)


THEIRS, OURS = Library(safetensors, safetensors), Library(fst, fst)


SHARED = torch.arange(6.0)
SAVED = {"a": torch.ones(1)}
GOOD = safetensors.torch.save(SAVED)
MALFORMED = [b"", b"1234567", GOOD[:-1], GOOD + b"1", GOOD[:20], encode([1]), b"\xff" * 64]
UNSAVABLE = [np.array([None]), np.array(["a"]), np.zeros(1, complex), np.zeros(1, "M8[s]"), np.zeros(1, "i4,f4")]


def module_of(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def load_into(library, module, saved):
    library.torch.save_model(saved, "saved")
    library.torch.load_model(module, "saved", strict=False)


def error_of(library, function):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        function(library)
    return raised.value


TORCH_SAVE = {
    "not a dict": "text",
    "not a tensor": {"test": {"some": "thing"}},
    "sparse": {"test": torch.sparse_coo_tensor(size=(2, 3))},
}
# Calls whose errors have the type and the text of safetensors.
SAME_TEXT = {
    "no file": lambda lib: lib.open("none"),
    "no file to load": lambda lib: lib.torch.load_file("none"),
    "no file of a model": lambda lib: lib.torch.load_model(torch.nn.Linear(2, 2), "none"),
    "list of indices": lambda lib: lib.open(framework="np").get_slice("a")[[0, 1]],
    "two ellipses": lambda lib: lib.open(framework="np").get_slice("a")[..., ...],
    "negative index out of range": lambda lib: lib.open(framework="np").get_slice("a")[1:, -6],
    "index out of range": lambda lib: lib.open(framework="np").get_slice("a")[1:, 20],
    "index after an ellipsis": lambda lib: lib.open(framework="np").get_slice("a")[..., 4],
    "negative step": lambda lib: lib.open(framework="np").get_slice("a")[::-1],
    "shapes of a model": lambda lib: load_into(lib, nn.Linear(3, 3), nn.Linear(2, 3)),
} | {name: lambda lib, tensors=tensors: lib.torch.save_file(tensors, "o") for name, tensors in TORCH_SAVE.items()}
# Calls whose errors have the type of safetensors, and a text that contains or begins with this part of its text.
SAME_PART = {
    "framework": (lambda lib: lib.open(framework="cobol"), "framework cobol is invalid"),
    "device": (lambda lib: lib.open(device="nope"), "device nope is invalid"),
    "device with an index": (lambda lib: lib.open(device="cpu:3"), "device cpu:3 is invalid"),
    "device of another type": (lambda lib: lib.open(device=1.5), "device 1.5 is invalid"),
    "NumPy on a GPU": (lambda lib: lib.open(framework="np", device="cuda:0"), "Device cuda:0 is not supported"),
    "backend": (lambda lib: lib.open(backend="x"), 'backend "x" is invalid'),
    "F6 file": (lambda lib: lib.torch.load_file("f6.safetensors"), "F6_E2M3"),
    "no tensor": (lambda lib: lib.open().get_tensor("zz"), "File does not contain tensor zz"),
    "no tensor for a slice": (lambda lib: lib.open().get_slice("zz"), "File does not contain tensor zz"),
    "text as an index": (
        lambda lib: lib.open(framework="np").get_slice("a")["a"],
        "Unsupported slice index at position 0: expected slice, int, or ellipsis",
    ),
    "shared memory": (
        lambda lib: lib.torch.save_file(dict.fromkeys("ab", torch.zeros(4)), "o"),
        "Some tensors share memory",
    ),
    "rows of one tensor": (
        lambda lib: lib.torch.save_file({"a": SHARED, "b": SHARED[:3]}, "o"),
        "Some tensors share memory",
    ),
    "overlapping rows": (lambda lib: lib.torch.save({"a": SHARED[:4], "b": SHARED[3:]}), "Some tensors share memory"),
    "parts of an unnamed tensor": (lambda lib: lib.torch.save_model(module_of(a=SHARED[:3], b=SHARED[3:]), "o"), "'a'"),
    "sparse model": (
        lambda lib: lib.torch.save_model(module_of(a=torch.ones(2, 3).to_sparse()), "o", force_contiguous=False),
        "You are trying to save a sparse tensors: `['a']`",
    ),
    "model that is not contiguous": (
        lambda lib: lib.torch.save_model(module_of(a=torch.ones(3, 4).t()), "o", force_contiguous=False),
        "force_contiguous=True",
    ),
    "not contiguous": (
        lambda lib: lib.torch.save_file({"a": torch.zeros(3, 4).t()}, "o"),
        "You are trying to save a non contiguous tensor: `a` which is not allowed",
    ),
    "on meta": (
        lambda lib: lib.torch.save_file({"a": torch.zeros(3, device="meta")}, "o"),
        "Cannot copy out of meta tensor",
    ),
}
SAME_TYPE = {
    "framework of another type": lambda lib: lib.open(framework=3),
    "backend of another type": lambda lib: lib.open(backend=3),
    "path of another type": lambda lib: lib.open(3),
    "name of another type": lambda lib: lib.open().get_tensor(3),
    "F6": lambda lib: lib.open("f6.safetensors").get_tensor("x"),
    "F6 slice": lambda lib: lib.open("f6.safetensors").get_slice("x")[...],
    "F6 array": lambda lib: lib.open("f6.safetensors", "np").get_tensor("x"),
    "F6 file as arrays": lambda lib: lib.numpy.load_file("f6.safetensors"),
    "metadata": lambda lib: lib.torch.save_file({"a": torch.zeros(2)}, "o", metadata={"a": 1}),
    "name to save": lambda lib: lib.torch.save_file({3: torch.zeros(2)}, "o"),
    "no folder": lambda lib: lib.torch.save_file({"a": torch.zeros(2)}, "no/o"),
    "metadata of another type": lambda lib: lib.torch.save(SAVED, ["a"]),
    "text": lambda lib: lib.torch.load("xx"),
    "bytes": lambda lib: lib.torch.load(GOOD[:-1]),
    "folder to save to": lambda lib: lib.torch.save_file(SAVED, "."),
    "bytes as a path": lambda lib: lib.torch.save_file(SAVED, b"o"),
    "metadata of arrays": lambda lib: lib.numpy.save({"a": np.zeros(1)}, {"a": 1}),
    "metadata of arrays of another type": lambda lib: lib.numpy.save({"a": np.zeros(1)}, ["a"]),
    "name of an array": lambda lib: lib.numpy.save({1: np.zeros(1)}),
    "text with arrays": lambda lib: lib.numpy.load("m"),
}
for number in range(len(MALFORMED)):
    SAME_TYPE[f"malformed file {number}"] = lambda lib, number=number: lib.torch.load_file(f"malformed-{number}")
for array in UNSAVABLE:
    SAME_PART[f"array of {array.dtype}"] = lambda lib, array=array: lib.numpy.save({"a": array}), "dtype"


CALLS = [
    *(pytest.param(call, None, id=name) for name, call in SAME_TEXT.items()),
    *(pytest.param(call, part, id=name) for name, (call, part) in SAME_PART.items()),
    *(pytest.param(call, "", id=name) for name, call in SAME_TYPE.items()),
]


@pytest.mark.parametrize(("call", "part"), CALLS)
def test_same_error(call, part):
    theirs, ours = error_of(THEIRS, call), error_of(OURS, call)
    assert isinstance(ours, type(theirs))
    assert part is not None or str(ours) == str(theirs)
    assert part is None or (part in str(theirs) and part in str(ours))
    assert not Path("o").exists()


def test_names_are_unicode():
    for library in (THEIRS, OURS):
        for save in (library.torch.save, lambda tensors, library=library: library.torch.save_file(tensors, "o")):
            with pytest.raises(ValueError, match="ud800"):
                save({"\ud800": torch.ones(1)})


@no_cuda
@pytest.mark.parametrize("load", ["get_tensor", "get_slice", "load_file"])
def test_no_driver(load):
    """Without a driver, opening succeeds and loading raises PyTorch's error."""

    def run(library):
        if load == "load_file":
            return library.torch.load_file("m.safetensors", device="cuda:0")
        file = library.open(device="cuda:0")
        return file.get_tensor("a") if load == "get_tensor" else file.get_slice("a")[0]

    theirs, ours = error_of(THEIRS, run), error_of(OURS, run)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


def test_missing_file_has_its_number():
    assert error_of(OURS, SAME_TEXT["no file"]).errno == errno.ENOENT


def test_unsupported_dtype_is_not_implemented():
    """The exception of other loads of fst is caught by the same clauses."""
    with pytest.raises(NotImplementedError):
        fst.safe_open("f6.safetensors").get_tensor("x")
    with pytest.raises(fst.SafetensorError):
        fst.load_file("f6.safetensors")


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_other_names_are_those_of_safetensors(module):
    """Programs import functions for raw bytes, and private ones."""
    theirs, ours = getattr(safetensors, module), getattr(fst, module)
    names = {name for name in vars(theirs) if not name.startswith("__")}
    assert {"serialize", "serialize_file", "deserialize", "TensorSpec"} <= names
    assert {name for name in names if not hasattr(ours, name)} == set()
    assert ours.serialize is theirs.serialize
    with pytest.raises(ours.SafetensorError, match="header"):
        ours.deserialize(b"")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ours.no_such_name
