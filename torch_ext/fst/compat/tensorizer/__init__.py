"""Public names of tensorizer 2, implemented with fst.

from fst.compat.tensorizer import TensorDeserializer, TensorSerializer
"""

import importlib
from types import ModuleType

from fst.compat.tensorizer import serialization, stream_io, torch_compat, utils
from fst.compat.tensorizer.serialization import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FilterFuncType,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

# Release of tensorizer that this package mirrors. Programs compare it with the release they require.
__version__ = "2.12.1"

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
    "serialization",
    "stream_io",
    "torch_compat",
    "utils",
]

# They need the package protobuf, which most programs do not.
_LAZY_MODULES = ("protobuf", "tensors_pb2")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
