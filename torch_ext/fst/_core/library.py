"""Finds libfst.so and lets PyTorch load it, which registers the operators."""

import mmap
import re
from pathlib import Path

import torch

_HOW_TO_BUILD = "build it with `make build` in a checkout, or `pip install .` there"
# The build leaves this text in the library.
_BUILT_FOR = re.compile(rb"fst: built for PyTorch (\d+\.\d+)")


def _built_for(library: Path) -> str | None:
    """The `major.minor` of the PyTorch that `library` was built for, read without running any of its code."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _BUILT_FOR.search(content)
        return found[1].decode() if found else None


def load_library(library: Path) -> None:
    """Registers the operators of `library`.

    Raises ImportError where there is no such file, or where it was built for another PyTorch: the library calls
    PyTorch's C++ functions, whose binary interface changes with every release.
    """
    if not library.is_file():
        raise ImportError(f"{library} is missing; {_HOW_TO_BUILD}", name="fst", path=str(library))
    built_for = _built_for(library)
    if built_for and built_for != ".".join(torch.__version__.split(".")[:2]):
        message = (
            f"{library} was built for PyTorch {built_for}, but this is PyTorch {torch.__version__}; {_HOW_TO_BUILD}"
        )
        raise ImportError(message, name="fst", path=str(library))
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        message = f"PyTorch {torch.__version__} cannot load {library}: {error.__cause__ or error}; {_HOW_TO_BUILD}"
        raise ImportError(message, name="fst", path=str(library)) from error


load_library(Path(__file__).parents[1] / "libfst.so")
