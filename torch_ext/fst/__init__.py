"""Loads safetensors files into PyTorch tensors.

    import fst

    weights = fst.load_file("model.safetensors", "cuda:0")

Everything here is also an operator under `torch.ops.fst`, for TorchScript and for C++ programs. What CMake looks for
is in `cmake_prefix_path`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fst._checkpoint.safe_open import safe_open
from fst._core.errors import SafetensorError
from fst._core.library import version as __version__
from fst._core.memory import release_memory
from fst._load.convert import cast, scatter
from fst._load.load import (
    load_boxes,
    load_file,
    load_files,
    load_into,
    load_slices,
    load_tensors,
    metadata,
    tensor_names,
)
from fst._load.stream import Stream, stream
from fst._patch import patch, unpatch
from fst._profile.profile import Profile, profile
from fst._profile.summary import ReaderUse, StageTime, Summary
from fst._save.save import save_file, save_file_async
from fst._save.writer import Writer

if TYPE_CHECKING:
    from fst._distributed.dtensor_load import load_distributed
    from fst._distributed.group import RankError
    from fst._distributed.sharded import load_sharded
    from fst._module.load_module import ModuleMismatchError, load_module

__all__ = [
    "ModuleMismatchError",
    "Profile",
    "RankError",
    "ReaderUse",
    "SafetensorError",
    "StageTime",
    "Stream",
    "Summary",
    "Writer",
    "__version__",
    "cast",
    "cmake_prefix_path",
    "load_boxes",
    "load_distributed",
    "load_file",
    "load_files",
    "load_into",
    "load_module",
    "load_sharded",
    "load_slices",
    "load_tensors",
    "metadata",
    "patch",
    "profile",
    "release_memory",
    "safe_open",
    "save_file",
    "save_file_async",
    "scatter",
    "stream",
    "tensor_names",
    "unpatch",
]

# Where CMake's find_package(fst) finds the header and the library, as `torch.utils.cmake_prefix_path` is for PyTorch.
cmake_prefix_path = f"{__path__[0]}/share/cmake"

# What modules and groups of ranks need is a third of the package, and most programs use none of it.
_IMPORTED_ON_USE = {
    "ModuleMismatchError": "_module.load_module",
    "RankError": "_distributed.group",
    "load_distributed": "_distributed.dtensor_load",
    "load_module": "_module.load_module",
    "load_sharded": "_distributed.sharded",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_IMPORTED_ON_USE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
