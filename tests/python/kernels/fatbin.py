"""The device kernels in the library: the image, and the PTX beside it."""

import ctypes
import importlib.util
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_ZSTD = 0x8000  # the flag of entries that are compressed with Zstandard, which nvcc 13 uses


class Entry(NamedTuple):
    """Code for one architecture: PTX, or machine code."""

    is_ptx: bool
    architecture: int
    is_compressed: bool
    stored: bytes
    code_bytes: int

    def ptx(self) -> str:
        code = _decompress(self.stored, self.code_bytes) if self.is_compressed else self.stored
        return code.rstrip(b"\0").decode()


def entries(path: Path) -> list[Entry]:
    """Returns the entries of the image in a library or another file. Without an image, there are none."""
    data = path.read_bytes()
    begin = data.find(_MAGIC)
    if begin < 0:
        return []
    assert data.find(_MAGIC, begin + 1) < 0, "the file has several images"
    [length] = struct.unpack_from("<Q", data, begin + 8)
    at, found = begin + 16, []
    while at < begin + 16 + length:
        kind, _, header_bytes, padded_bytes, stored_bytes = struct.unpack_from("<HHIQI", data, at)
        [architecture] = struct.unpack_from("<I", data, at + 28)
        flags, code_bytes = struct.unpack_from("<QxxxxxxxxQ", data, at + 40)
        stored = data[at + header_bytes :][: stored_bytes or padded_bytes]
        found.append(Entry(kind == 1, architecture, bool(flags & _ZSTD), stored, code_bytes))
        at += header_bytes + padded_bytes
    return found


def ptx_for_old_drivers(library: Path) -> str | None:
    """Returns the PTX beside the image in a library, or None if it has none. A zero ends it."""
    data = library.read_bytes()
    version = data.find(b"\n.version ")
    begin = data.rfind(b"\0", 0, version) + 1
    return None if version < 0 else data[data.index(b"//", begin, version) : data.index(b"\0", version)].decode()


def ptxas_of_cuda_12() -> Path:
    """Finds the assembler of CUDA 12.0, of which drivers from 525.60 on have a copy, or skips the test."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (found := Path(folder, "cuda_nvcc", "bin", "ptxas")).is_file():
            return found
    pytest.skip("the ptxas of requirements/dev.txt is not installed")


def _decompress(data: bytes, length: int) -> bytes:
    """Decompresses with the library on which g++, dpkg and rpm depend: Python has Zstandard only from 3.14 on."""
    zstd = ctypes.CDLL("libzstd.so.1")
    zstd.ZSTD_decompress.restype = ctypes.c_size_t
    zstd.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    target = ctypes.create_string_buffer(length)
    assert zstd.ZSTD_decompress(target, length, data, len(data)) == length, "the image cannot be decompressed"
    return target.raw
