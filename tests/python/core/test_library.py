"""Errors for a library that cannot be loaded."""

from pathlib import Path

import pytest
import torch

import fst
from fst._core.library import load_library


def test_missing_library(tmp_path):
    with pytest.raises(ImportError, match=f"{tmp_path}/libfst.so is missing.*make build") as raised:
        load_library(tmp_path / "libfst.so")
    assert raised.value.path == str(tmp_path / "libfst.so")


def test_library_for_other_pytorch(tmp_path):
    """A library for another PyTorch is not opened, because opening runs its code."""
    library = tmp_path / "libfst.so"
    library.write_bytes(b"\x7fELF" + bytes(100) + b"fst 0.1.0: built for PyTorch 1.13.1\0" + bytes(100))
    with pytest.raises(ImportError, match=r"built for PyTorch 1\.13, .*make build") as raised:
        load_library(library)
    assert torch.__version__ in str(raised.value)


def test_corrupt_library(tmp_path):
    library = tmp_path / "libfst.so"
    library.write_bytes(b"not for the linker")
    with pytest.raises(ImportError, match=f"cannot load {library}: .*(file too short|invalid ELF header).*make build"):
        load_library(library)


def test_library_contains_pytorch_release():
    content = Path(fst.__file__).with_name("libfst.so").read_bytes()
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert f"fst {fst.__version__}: built for PyTorch {release}".encode() in content
