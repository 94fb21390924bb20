"""The layer that fits this PyTorch, and errors for one that is missing or cannot be loaded."""

import re
import subprocess

import pytest
import torch

import fst
from fst._core.build import PACKAGE, layer_for, read_version, torch_releases
from fst._core.library import load_library


def test_missing_library(tmp_path):
    library = layer_for(torch.__version__, tmp_path)
    with pytest.raises(ImportError, match=f"{library} is missing.*make build") as raised:
        load_library(tmp_path)
    assert raised.value.path == str(library)


def test_libraries_for_other_pytorch(tmp_path):
    """A layer for another PyTorch is not opened, because opening runs its code."""
    for release in ("1.9", "1.13"):
        layer_for(f"{release}.1", tmp_path).write_bytes(b"not for the linker")
    with pytest.raises(ImportError, match=r"built for PyTorch 1\.9, 1\.13, .*make build") as raised:
        load_library(tmp_path)
    assert torch.__version__ in str(raised.value)


def test_corrupt_library(tmp_path):
    library = layer_for(torch.__version__, tmp_path)
    library.write_bytes(b"not for the linker")
    with pytest.raises(ImportError, match=f"cannot load {library}: .*(file too short|invalid ELF header).*make build"):
        load_library(tmp_path)


def test_layer_for_version(tmp_path):
    for version in ("2.11.0+cu130", "2.11.1"):
        assert layer_for(version, tmp_path) == tmp_path / "libfst_torch_2.11.so"
    for version in ("2.16.0a0+git1234", "2.16.0.dev20261101+cpu"):
        assert layer_for(version, tmp_path) == tmp_path / "libfst_torch_2.16.so"


def test_layers_contain_their_versions():
    """Python and CMake find a layer by its name, and the name says what it was built for."""
    releases = torch_releases()
    assert ".".join(torch.__version__.split(".")[:2]) in releases
    for release in releases:
        layer = layer_for(release)
        assert read_version(layer) == fst.__version__
        assert f"fst {fst.__version__}: built for PyTorch {release}.".encode() in layer.read_bytes()


def test_core_needs_no_pytorch():
    """The core is the same for every PyTorch."""
    content = (PACKAGE / "libfst_core.so").read_bytes()
    assert b"libtorch" not in content
    assert b"libc10" not in content


def test_exported_symbols():
    """Programs that load the libraries see the functions of the FFI boundary, and none of dependencies."""
    own = re.compile(r"(fst\$)?cxxbridge1\$|fst_")
    for library in PACKAGE.glob("libfst_*.so"):
        command = ["nm", "--dynamic", "--defined-only", "--format=posix", library]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = [line.split()[0] for line in listed.splitlines()]
        assert [name for name in names if not own.match(name)] == []
