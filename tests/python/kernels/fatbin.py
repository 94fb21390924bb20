"""The device kernels: code in the library, and PTX by the same nvcc."""

import importlib.util
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import fst
from suite import CHECKOUT

LIBRARY = Path(fst.__file__).parent / "libfst_core.so"
_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)


class Entry(NamedTuple):
    """Code for one architecture: PTX, or machine code."""

    is_ptx: bool
    architecture: int


def entries() -> list[Entry]:
    """Returns the entries of the image in the library. Without an image, there are none."""
    data = LIBRARY.read_bytes()
    begin = data.find(_MAGIC)
    if begin < 0:
        return []
    assert data.find(_MAGIC, begin + 1) < 0, "the file has several images"
    [length] = struct.unpack_from("<Q", data, begin + 8)
    at, found = begin + 16, []
    while at < begin + 16 + length:
        kind, _, header_bytes, padded_bytes = struct.unpack_from("<HHIQ", data, at)
        [architecture] = struct.unpack_from("<I", data, at + 28)
        found.append(Entry(kind == 1, architecture))
        at += header_bytes + padded_bytes
    return found


def ptx_for_old_drivers() -> str:
    """Returns the PTX beside the image, which a zero ends, or skips the test if the library has none."""
    data = LIBRARY.read_bytes()
    version = data.find(b"\n.version ")
    if version < 0:
        pytest.skip("the library was built without nvcc")
    begin = data.rfind(b"\0", 0, version) + 1
    return data[data.index(b"//", begin, version) : data.index(b"\0", version)].decode()


def compile_ptx(architecture: int, folder: Path) -> str:
    """Compiles the kernels with the options of csrc/kernels/build.rs. Returns the PTX."""
    target = f"-gencode=arch=compute_{architecture},code=compute_{architecture}"
    source = CHECKOUT / "csrc" / "kernels" / "kernels.cu"
    command = [_nvcc(), "-ptx", "-std=c++17", "-O3", target, source, "-o", folder / "kernels.ptx"]
    subprocess.run(command, check=True)
    return (folder / "kernels.ptx").read_text()


def _packages() -> list[str]:
    """Returns the folders with the packages of NVIDIA."""
    spec = importlib.util.find_spec("nvidia")
    return list((spec.submodule_search_locations if spec else None) or [])


def _nvcc() -> Path:
    """Finds nvcc as csrc/kernels/build.rs does, or skips the test."""
    folders = [Path(folder, "cu13") for folder in _packages()]
    folders += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for folder in folders:
        if (folder / "bin" / "nvcc").is_file():
            return folder / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("there is no nvcc")
    return Path(found)


def ptxas_of_cuda_12() -> Path:
    """Finds the assembler of CUDA 12.0, of which drivers from 525.60 on have a copy, or skips the test."""
    for folder in _packages():
        if (found := Path(folder, "cuda_nvcc", "bin", "ptxas")).is_file():
            return found
    pytest.skip("the ptxas of requirements/dev.txt is not installed")
