"""Library of the package, and the versions that it was built from and for. Needs no PyTorch."""

import mmap
import re
from pathlib import Path
from typing import NamedTuple

LIBRARY = Path(__file__).parents[1] / "libfst.so"
# Text that csrc/ops.cpp compiles into the library.
_BUILD_TEXT = re.compile(rb"fst (\S+): built for PyTorch (\d+\.\d+)")


class Build(NamedTuple):
    """Version of fst, and `major.minor` version of the PyTorch that it was built for."""

    version: str
    torch_release: str


def read_build(library: Path) -> Build | None:
    """Reads the versions of `library` without running any of its code. Returns None if it does not contain them."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _BUILD_TEXT.search(content)
        return Build(found[1].decode(), found[2].decode()) if found else None
