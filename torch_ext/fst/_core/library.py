"""Finds libfst.so and lets PyTorch load it, which registers the operators."""

import mmap
import re
from pathlib import Path
from typing import NamedTuple

import torch

_HOW_TO_BUILD = "build it with `make build` in a checkout, or `pip install .` there"
# Text that csrc/ops.cpp compiles into the library.
_BUILD_TEXT = re.compile(rb"fst (\S+): built for PyTorch (\d+\.\d+)")


class _Build(NamedTuple):
    """Version of fst, and `major.minor` version of the PyTorch that it was built for."""

    version: str
    torch_release: str


def _read_build(library: Path) -> _Build | None:
    """Reads the versions of `library` without running any of its code. Returns None if it does not contain them."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _BUILD_TEXT.search(content)
        return _Build(found[1].decode(), found[2].decode()) if found else None


def load_library(library: Path) -> str:
    """Registers the operators of `library`.

    Returns:
        The version of fst that `library` was built from.

    Raises:
        ImportError: The file does not exist, or it was built for another PyTorch. The library calls PyTorch's C++
            functions, whose binary interface changes with every release.
    """
    if not library.is_file():
        raise ImportError(f"{library} is missing; {_HOW_TO_BUILD}", name="fst", path=str(library))
    build = _read_build(library)
    if build and build.torch_release != ".".join(torch.__version__.split(".")[:2]):
        message = (
            f"{library} was built for PyTorch {build.torch_release}, but this is PyTorch {torch.__version__}; "
            f"{_HOW_TO_BUILD}"
        )
        raise ImportError(message, name="fst", path=str(library))
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        message = f"PyTorch {torch.__version__} cannot load {library}: {error.__cause__ or error}; {_HOW_TO_BUILD}"
        raise ImportError(message, name="fst", path=str(library)) from error
    return build.version if build else "unknown"


version = load_library(Path(__file__).parents[1] / "libfst.so")
