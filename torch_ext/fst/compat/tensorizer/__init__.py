"""Public names of tensorizer 2, implemented with fst.

from fst.compat.tensorizer import TensorDeserializer, TensorSerializer
"""

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
