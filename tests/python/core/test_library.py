"""A library that cannot be loaded says what it was built for and what to do."""

from pathlib import Path

import pytest
import torch

import fst
from fst._core.library import load_library


def test_a_library_that_is_missing(tmp_path):
    with pytest.raises(ImportError, match=f"{tmp_path}/libfst.so is missing.*make build") as raised:
        load_library(tmp_path / "libfst.so")
    assert raised.value.path == str(tmp_path / "libfst.so")


def test_a_library_for_another_pytorch(tmp_path):
    """It must not even be opened by the linker, which would run its code."""
    library = tmp_path / "libfst.so"
    library.write_bytes(b"\x7fELF" + bytes(100) + b"fst 0.1.0: built for PyTorch 1.13.1\0" + bytes(100))
    with pytest.raises(ImportError, match=r"built for PyTorch 1\.13, .*make build") as raised:
        load_library(library)
    assert torch.__version__ in str(raised.value)


def test_a_library_that_is_broken(tmp_path):
    library = tmp_path / "libfst.so"
    library.write_bytes(b"not for the linker")
    with pytest.raises(ImportError, match=f"cannot load {library}: .*(file too short|invalid ELF header).*make build"):
        load_library(library)


def test_the_library_says_what_it_was_built_for():
    content = Path(fst.__file__).with_name("libfst.so").read_bytes()
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert f"fst {fst.__version__}: built for PyTorch {release}".encode() in content
