"""Public names of tensorizer's module `serialization`."""

from fst.compat.tensorizer._deserializer import TensorDeserializer
from fst.compat.tensorizer._encryption import CryptographyError, DecryptionParams, EncryptionParams
from fst.compat.tensorizer._serializer import TensorSerializer
from fst.compat.tensorizer._slots import TensorType
from fst.compat.tensorizer._tree import FilterFuncType
from fst.compat.tensorizer._verification import HashMismatchError

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "HashMismatchError",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
]
