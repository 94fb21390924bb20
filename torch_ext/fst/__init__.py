"""Loads safetensors files into PyTorch tensors.

    import fst

    weights = fst.load_file("model.safetensors", "cuda:0")

Everything here is also an operator under `torch.ops.fst`, for TorchScript and for C++ programs. What CMake looks for
is in `cmake_prefix_path`.
"""

from fst._convert import cast, scatter
from fst._distributed import load_distributed
from fst._errors import SafetensorError
from fst._load import load_boxes, load_file, load_files, load_into, load_slices, load_tensors, metadata, tensor_names
from fst._memory import release_memory
from fst._module import ModuleMismatchError, load_module
from fst._patch import patch, unpatch
from fst._profile import Profile, profile
from fst._ranks import RankError
from fst._safe_open import safe_open
from fst._save import save_file, save_file_async
from fst._sharded import load_sharded
from fst._stream import Stream, stream
from fst._summary import ReaderUse, StageTime, Summary
from fst._writer import Writer

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
