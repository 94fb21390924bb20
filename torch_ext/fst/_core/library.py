"""Finds libfst.so and lets PyTorch load it, which registers the operators."""

from pathlib import Path

import torch

from fst._core.build import LIBRARY, read_build

_HOW_TO_BUILD = "build it with `make build` in a checkout, or `pip install .` there"


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
    build = read_build(library)
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


version = load_library(LIBRARY)
