"""Errors of `fst.safe_open`, `fst.torch` and `fst.numpy` beside those of safetensors for the same calls."""

import errno
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import fst
import fst.numpy
import fst.torch

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Files under relative paths, which messages contain."""
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"a": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(1.0)}, "m.safetensors")
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "f6.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))


class Library:
    def __init__(self, package, modules):
        self.safe_open, self.torch, self.numpy = package.safe_open, modules.torch, modules.numpy

    def open(self, path="m.safetensors", framework="pt", **kwargs):
        return self.safe_open(path, framework, **kwargs)


THEIRS, OURS = Library(safetensors, safetensors), Library(fst, fst)


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
    "no file": lambda library: library.open("none"),
    "no file to load": lambda library: library.torch.load_file("none"),
    "no file to load as arrays": lambda library: library.numpy.load_file("none"),
    "no file of a model": lambda library: library.torch.load_model(torch.nn.Linear(2, 2), "none"),
    "list of indices": lambda library: library.open(framework="np").get_slice("a")[[0, 1]],
    "two ellipses": lambda library: library.open(framework="np").get_slice("a")[..., ...],
    "negative index out of range": lambda library: library.open(framework="np").get_slice("a")[1:, -6],
    "index out of range": lambda library: library.open(framework="np").get_slice("a")[1:, 20],
    "index after an ellipsis": lambda library: library.open(framework="np").get_slice("a")[..., 4],
    "negative step": lambda library: library.open(framework="np").get_slice("a")[::-1],
} | {
    name: lambda library, tensors=tensors: library.torch.save_file(tensors, "o") for name, tensors in TORCH_SAVE.items()
}
# Calls whose errors have the type of safetensors, and a text that contains or begins with this part of its text.
SAME_PART = {
    "framework": (lambda library: library.open(framework="cobol"), "framework cobol is invalid"),
    "device": (lambda library: library.open(device="nope"), "device nope is invalid"),
    "device of another type": (lambda library: library.open(device=1.5), "device 1.5 is invalid"),
    "NumPy on a GPU": (lambda library: library.open(framework="np", device="cuda:0"), "Device cuda:0 is not supported"),
    "backend": (lambda library: library.open(backend="x"), 'backend "x" is invalid'),
    "no tensor": (lambda library: library.open().get_tensor("zz"), "File does not contain tensor zz"),
    "no tensor for a slice": (lambda library: library.open().get_slice("zz"), "File does not contain tensor zz"),
    "text as an index": (
        lambda library: library.open(framework="np").get_slice("a")["a"],
        "Unsupported slice index at position 0: expected slice, int, or ellipsis",
    ),
    "shared memory": (
        lambda library: library.torch.save_file(dict.fromkeys("ab", torch.zeros(4)), "o"),
        "Some tensors share memory",
    ),
    "not contiguous": (
        lambda library: library.torch.save_file({"a": torch.zeros(3, 4).t()}, "o"),
        "You are trying to save a non contiguous tensor: `a` which is not allowed",
    ),
    "on meta": (
        lambda library: library.torch.save_file({"a": torch.zeros(3, device="meta")}, "o"),
        "Cannot copy out of meta tensor",
    ),
}
SAME_TYPE = {
    "framework of another type": lambda library: library.open(framework=3),
    "backend of another type": lambda library: library.open(backend=3),
    "path of another type": lambda library: library.open(3),
    "name of another type": lambda library: library.open().get_tensor(3),
    "F6": lambda library: library.open("f6.safetensors").get_tensor("x"),
    "F6 slice": lambda library: library.open("f6.safetensors").get_slice("x")[...],
    "F6 array": lambda library: library.open("f6.safetensors", "np").get_tensor("x"),
    "F6 file": lambda library: library.torch.load_file("f6.safetensors"),
    "F6 file as arrays": lambda library: library.numpy.load_file("f6.safetensors"),
    "metadata": lambda library: library.torch.save_file({"a": torch.zeros(2)}, "o", metadata={"a": 1}),
    "name to save": lambda library: library.torch.save_file({3: torch.zeros(2)}, "o"),
    "no folder": lambda library: library.torch.save_file({"a": torch.zeros(2)}, "no/o"),
    "array of objects": lambda library: library.numpy.save_file({"a": np.array([object()])}, "o"),
    "bytes": lambda library: library.torch.load(b"xx"),
    "text": lambda library: library.torch.load("xx"),
}


@pytest.mark.parametrize("call", SAME_TEXT.values(), ids=SAME_TEXT)
def test_same_text(call):
    theirs, ours = error_of(THEIRS, call), error_of(OURS, call)
    assert isinstance(ours, type(theirs))
    assert str(ours) == str(theirs)
    assert not Path("o").exists()


@pytest.mark.parametrize(("call", "part"), SAME_PART.values(), ids=SAME_PART)
def test_same_part(call, part):
    theirs, ours = error_of(THEIRS, call), error_of(OURS, call)
    assert isinstance(ours, type(theirs))
    assert part in str(theirs)
    assert part in str(ours)


@pytest.mark.parametrize("call", SAME_TYPE.values(), ids=SAME_TYPE)
def test_same_type(call):
    assert isinstance(error_of(OURS, call), type(error_of(THEIRS, call)))


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
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ours.no_such_name
