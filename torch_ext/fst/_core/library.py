"""Lets PyTorch load the layer that was built for its release, which registers the operators."""

from pathlib import Path

import torch

from fst._core.build import PACKAGE, layer_for, read_version, torch_releases

_HOW_TO_BUILD = "build fst for this PyTorch with `make build` in a checkout, or `pip install .` there"


def load_library(package: Path) -> str:
    """Registers the operators of the layer in the directory `package`.

    Returns:
        The version of fst that the layer was built from.

    Raises:
        ImportError: There is no layer for this PyTorch, or it cannot be loaded. A layer calls PyTorch's C++ functions,
            whose binary interface changes with every minor release.
    """
    library = layer_for(torch.__version__, package)
    if library.is_file():
        try:
            torch.ops.load_library(library)
        except OSError as error:
            message = f"PyTorch {torch.__version__} cannot load {library}: {error.__cause__ or error}; {_HOW_TO_BUILD}"
            raise ImportError(message, name="fst", path=str(library)) from error
        return read_version(library) or "unknown"
    message = f"{library} is missing; {_HOW_TO_BUILD}"
    releases = torch_releases(package)
    if releases:
        message = (
            f"fst in {package} was built for PyTorch {', '.join(releases)}, but this is PyTorch {torch.__version__}; "
            f"install a PyTorch that it was built for, or {_HOW_TO_BUILD}"
        )
    raise ImportError(message, name="fst", path=str(library))


version = load_library(PACKAGE)
