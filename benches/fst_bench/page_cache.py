"""Loads a file into the page cache or drops it, and verifies the result."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

CHUNK_BYTES = 16 << 20
WARM_PASSES = 4
WARM_TOLERANCE = 0.002


def warm(path: Path) -> None:
    """Reads the file until the page cache holds all but `WARM_TOLERANCE` of it.

    Some kernels reclaim idle pages even when memory is free, so a few pages may be gone
    again when the last ones are read.
    """
    size = missing = path.stat().st_size
    for _ in range(WARM_PASSES):
        _read_through(path)
        missing = size - resident_bytes(path)
        if missing <= size * WARM_TOLERANCE:
            return
    raise RuntimeError(f"{path}: the page cache keeps losing {missing} of {size} bytes")


def _read_through(path: Path) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop(path: Path) -> None:
    """Drops the file from the page cache. Needs no privilege once the file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_bytes(path)
    if left > 0:
        raise RuntimeError(f"{path}: {left} bytes stayed in the page cache after DONTNEED")


def resident_bytes(path: Path) -> int:
    """Returns the number of bytes of the file in the page cache, rounded up to whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        pages = np.empty(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
        status = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(len(view)),
            ctypes.c_void_p(pages.ctypes.data),
        )
        del view
        if status != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
