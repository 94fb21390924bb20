"""Names of the package `fst`, and what an import and first loads import."""

from pathlib import Path

import pytest

import fst

# Ends the program if a module below one of these packages is imported.
PROGRAM = """
import sys, torch

def assert_not_imported(*packages):
    found = [name for name in sys.modules if f"{name}.".startswith(tuple(f"{package}." for package in packages))]
    assert not found, found

# An import of fst imports neither the packages that it patches nor its plugins and interfaces of other packages.
import fst
assert not set(dir(fst)) - set(fst.__all__)
assert_not_imported("transformers", "safetensors.torch", "fst.torch", "fst.plugins")

# First loads import no code for DTensors. Some functions of PyTorch on meta tensors import sympy, which takes longer
# than most loads.
fst.save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "linear.safetensors")
fst.load_file("linear.safetensors")
fst.load_module(torch.nn.Linear(2, 2), "linear.safetensors")
assert_not_imported("torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "fst.dcp")
fst.load_module(torch.nn.Linear(2, 2, device="meta"), "linear.safetensors")
from fst.compat.tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
key = EncryptionParams.random()
for path, encryption in (("plain.tensors", None), ("secret.tensors", key)):
    with TensorSerializer(path, encryption=encryption) as serializer:
        serializer.write_state_dict({"a": torch.ones(3)})
for path, options in (
    ("plain.tensors", {"verify_hash": True}),
    ("secret.tensors", {"encryption": DecryptionParams.from_key(key.key)}),
):
    with TensorDeserializer(path, device="cpu", **options) as deserializer:
        assert deserializer["a"].sum() == 3
assert_not_imported("sympy")

# Without safetensors, `fst.patch` changes nothing, and fst.torch has its own names only.
for name in [name for name in sys.modules if f"{name}.".startswith("safetensors.")]:
    del sys.modules[name]
sys.modules["safetensors"] = None
for _ in range(2):
    try:
        fst.patch()
    except ImportError as error:
        assert "safetensors" in str(error)
    else:
        raise SystemExit("patched")
fst.unpatch()
import fst.torch
try:
    fst.torch.serialize
except AttributeError as error:
    assert "fst.torch" in str(error)
else:
    raise SystemExit("no error")

import fst.dcp
print(*sorted(set(dir(fst)) - set(fst.__all__)))
"""


def test_fresh_process(run_python):
    assert run_python(PROGRAM) == "compat dcp torch\n"


def test_public_names():
    assert (Path(fst.__file__).parent / "py.typed").is_file()
    assert set(fst.__all__) <= set(dir(fst))
    assert [name for name in fst.__all__ if not hasattr(fst, name)] == []
    with pytest.raises(AttributeError, match="module 'fst' has no attribute 'lod_file'"):
        fst.lod_file  # noqa: B018
