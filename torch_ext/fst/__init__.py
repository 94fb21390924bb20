"""Loads and saves safetensors files as PyTorch tensors.

    import fst

    weights = fst.load_file("model.safetensors", "cuda:0")

The loads and saves are also operators under `torch.ops.fst`, for TorchScript and for C++ programs. `cmake_prefix_path`
is the directory in which CMake finds the package `fst`.
"""

from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from fst import storage
from fst._checkpoint.safe_open import safe_open
from fst._core.encryption_key import EncryptionKey
from fst._core.errors import IntegrityError, ModuleMismatchError, SafetensorError, SourceChangedError, VersionError
from fst._core.group import RankError
from fst._core.library import version as __version__
from fst._core.ops import release_memory, warm_up
from fst._core.verify import IntegrityWarning
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
    verify,
)
from fst._load.quantized import dequantize, quantize
from fst._load.stream import Stream, stream
from fst._module.load_module import load_module
from fst._patch.patch import patch, unpatch
from fst._profile.metrics import metrics
from fst._profile.profile import Profile, profile
from fst._profile.summary import ReaderUse, StageTime, Summary
from fst._ranks.load_distributed import load_distributed
from fst._ranks.load_sharded import load_sharded
from fst._ranks.save_distributed import save_distributed
from fst._ranks.stream_sharded import stream_sharded
from fst._recipe.recipe import Recipe
from fst._save.rotate import rotate_key
from fst._save.save import save_file, save_file_async
from fst._save.writer import Writer
from fst._signatures.request import Verify
from fst._signatures.signature import Signature
from fst._update.delta_files import save_delta
from fst._update.prepare_update import prepare_update
from fst._update.update import Update
from fst._update.version import set_version, version_of

__all__ = [
    "EncryptionKey",
    "IntegrityError",
    "IntegrityWarning",
    "ModuleMismatchError",
    "Profile",
    "RankError",
    "ReaderUse",
    "Recipe",
    "SafetensorError",
    "Signature",
    "SourceChangedError",
    "StageTime",
    "Stream",
    "Summary",
    "Update",
    "Verify",
    "VersionError",
    "Writer",
    "__version__",
    "cast",
    "cmake_prefix_path",
    "dequantize",
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
    "metrics",
    "patch",
    "prepare_update",
    "profile",
    "quantize",
    "release_memory",
    "rotate_key",
    "safe_open",
    "save_delta",
    "save_distributed",
    "save_file",
    "save_file_async",
    "scatter",
    "set_version",
    "storage",
    "stream",
    "stream_sharded",
    "tensor_names",
    "unpatch",
    "verify",
    "version_of",
    "warm_up",
]

# Directory in which CMake's find_package(fst) finds the header and the library, like `torch.utils.cmake_prefix_path`.
cmake_prefix_path = f"{__path__[0]}/share/cmake"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        hint = f"; import fst.{name} first" if name in ("compat", "dcp", "numpy", "plugins", "torch") else ""
        raise AttributeError(f"module 'fst' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """Lists the public names, and the public submodules that have been imported."""
    modules = [name for name, value in globals().items() if isinstance(value, ModuleType) and not name.startswith("_")]
    return sorted({*__all__, *modules})
