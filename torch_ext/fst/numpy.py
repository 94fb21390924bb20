"""Drop-in replacement of `safetensors.numpy`: change the import, keep the program.

Signatures, results, exceptions and files are the same. docs/coming-from-safetensors.md lists the differences.
"""

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fst import _safetensors_api as api
from fst._checkpoint.safe_open import safe_open
from fst._core import errors
from fst._core.arguments import metadata_of, names_of, path_of
from fst._core.errors import SafetensorError
from fst._safetensors_api import safetensors_errors
from fst._save.save import write_file

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]

if not TYPE_CHECKING:
    SafetensorError = errors.LibraryError

    def __getattr__(name):
        """Returns other names of `safetensors.numpy`, such as `serialize`, if safetensors is installed."""
        return api.library_attribute(__name__, "safetensors.numpy", name)


Array = np.ndarray[Any, Any]


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, Array]:
    """Loads every tensor of a file as an array.

    Args:
        filename: A file, or a directory or index file as in `fst.load_file`.
        backend: "mmap" or "pread". It has no effect: fst chooses the reader itself.

    Returns:
        The arrays by name, in the order of their bytes in the file. They are writable, and writing does not change the
        file.

    Raises:
        FileNotFoundError, OSError: The operating system reported an error.
        TypeError: NumPy has no dtype for a tensor. The package ml_dtypes adds BF16 and the 8-bit floats.
        SafetensorError: The file is malformed, or an argument is invalid.

    Example:
        >>> import fst.numpy
        >>> fst.numpy.load_file("model.safetensors")["bias"]
        array([0., 0., 0., 0.], dtype=float32)
    """
    return api.load_file(filename, "np", "cpu", backend)


def load(data: bytes) -> dict[str, Array]:
    """Loads every tensor of a file in memory as an array.

    Args:
        data: The bytes of the file. They are copied, so later changes to them do not affect the arrays.

    Returns:
        The arrays by name, in the order of their bytes in the file.

    Raises:
        TypeError: NumPy has no dtype for a tensor, as in `load_file`.
        SafetensorError: The bytes are malformed.

    Example:
        >>> import fst.numpy, numpy
        >>> fst.numpy.load(fst.numpy.save({"a": numpy.arange(3)}))
        {'a': array([0, 1, 2])}
    """
    return api.load(data, "np")


def save_file(
    tensor_dict: dict[str, Array], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Saves arrays in a file, which is renamed to its path once it is complete.

    Args:
        tensor_dict: Arrays by name, with any strides and byte order. They may share memory.
        filename: The file.
        metadata: Text for the header.

    Raises:
        TypeError: A value is not an array.
        SafetensorError: The format has no dtype for a tensor, a name is reserved, or the file cannot be written. In the
            last case, the exception's cause is the error of the operating system.

    Example:
        >>> import fst.numpy, numpy
        >>> fst.numpy.save_file({"a": numpy.arange(3)}, "new.safetensors")
    """
    tensors, path, file_metadata = _tensors_of(tensor_dict), path_of(filename), metadata_of(metadata)
    with safetensors_errors(OSError):
        write_file(tensors, path, file_metadata)


def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file with these arrays.

    Args:
        tensor_dict, metadata: As in `save_file`.

    Returns:
        The whole file.

    Raises:
        The errors of `save_file`, except errors of the operating system.

    Example:
        >>> import fst.numpy, numpy
        >>> len(fst.numpy.save({"a": numpy.zeros(4, dtype="float32")}))
        80
    """
    return api.save(_tensors_of(tensor_dict), metadata_of(metadata))


def _tensors_of(arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
    if not isinstance(arrays, dict):
        raise TypeError(f"tensor_dict must be a dict of str to arrays, not {type(arrays).__name__}")
    names_of(list(arrays))
    return {name: _tensor_of(name, array) for name, array in arrays.items()}


def _tensor_of(name: str, array: Array) -> torch.Tensor:
    """Returns a contiguous tensor with the elements of an array. Shares the memory of a contiguous array."""
    if not isinstance(array, np.ndarray | np.generic):
        hint = "; fst.torch.save_file saves tensors" if isinstance(array, torch.Tensor) else ""
        raise TypeError(f'tensor "{name}": expected a NumPy array, not {type(array).__name__}{hint}')
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise errors.SafetensorError(f'tensor "{name}": safetensors has no dtype for {array.dtype.name}')
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    if plain.size == 0:
        return torch.empty(plain.shape, dtype=dtype)
    # Passes bytes, because PyTorch does not accept the dtypes of ml_dtypes.
    flat = torch.from_numpy(np.asarray(_Memory(plain)))
    return flat.view(dtype).view(plain.shape)


class _Memory:
    """Writable view of the bytes of an array. PyTorch warns about read-only arrays, even though it only reads."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (array.nbytes,),
            "data": (array.ctypes.data, False),
        }
