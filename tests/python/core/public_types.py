"""Uses of `fst` as a type checker sees them. pyrefly checks this file; nothing runs it."""

from typing import Any

import numpy as np
from torch import Tensor

import fst

weights: dict[str, Tensor] = fst.load_file("model.safetensors")
lazy_imports = [fst.load_module, fst.load_sharded, fst.load_distributed, fst.stream_sharded]
version: str = fst.__version__
row: Tensor = fst.safe_open("model.safetensors").get_slice("weight")[0]
array: np.ndarray[Any, Any] = fst.safe_open("model.safetensors", "np").get_slice("weight")[0]

# pyrefly reports an `ignore` that no error needs, so a module that accepts every name fails the check.
misspelt = fst.lod_file  # pyrefly: ignore[missing-attribute]
# pyrefly: ignore[bad-assignment]
framework: np.ndarray[Any, Any] = fst.safe_open("model.safetensors").get_tensor("weight")
