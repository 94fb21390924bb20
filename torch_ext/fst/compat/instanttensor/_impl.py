"""Names that programs import from InstantTensor's module `_impl`."""

from fst.compat.instanttensor._backend import Backend, BackendPolicy
from fst.compat.instanttensor._file import file_in_memory, read_safetensors_metadata
from fst.compat.instanttensor._safe_open import safe_open

__all__ = ["Backend", "BackendPolicy", "file_in_memory", "read_safetensors_metadata", "safe_open"]
