"""The functions of `safetensors.numpy`, over fst: change the import, keep the program.

Signatures, results and errors are theirs, and so are the files. Where fst does better, it says so; see
docs/coming-from-safetensors.md.
"""

import contextlib
import os
from typing import Any

import numpy as np
import torch

from fst import _safetensors_api as api
from fst._checkpoint.safe_open import safe_open
from fst._core.arguments import metadata_of, names_of, path_of
from fst._core.errors import SafetensorError
from fst._safetensors_api import safetensors_errors
from fst._save.save import write_file
from fst._save.serialize import serialize

with contextlib.suppress(ImportError):
    # It tells NumPy of bfloat16 and the 8-bit floats.
    import ml_dtypes  # noqa: F401

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]

Array = np.ndarray[Any, Any]


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, Array]:
    """Loads every tensor of a file as an array.

    Args:
        filename: A file; or a directory or an index, as for `fst.load_file`.
        backend: "mmap" or "pread". It changes nothing: fst finds the best way itself.

    Returns:
        The arrays by name, in the order of their bytes in the file. They may be written to, which changes no file.

    Raises:
        FileNotFoundError, OSError: What the operating system says.
        TypeError: NumPy has no dtype for a tensor. With the package ml_dtypes it has one for BF16 and the 8-bit floats.
        SafetensorError: The file is malformed, or an argument is not valid.

    Example:
        >>> import fst.numpy
        >>> fst.numpy.load_file("model.safetensors")["bias"]
        array([0., 0., 0., 0.], dtype=float32)
    """
    return api.load_file(filename, "np", "cpu", backend)


def load(data: bytes) -> dict[str, Array]:
    """Loads every tensor of a file that is in memory as an array.

    Args:
        data: The bytes of the file. They are copied; the arrays do not change with them.

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
    """Saves arrays in a file, which has its name once it is whole.

    Args:
        tensor_dict: Arrays by name, of any strides and byte order. They may share memory.
        filename: The file.
        metadata: Free text for the header.

    Raises:
        TypeError: Something is no array.
        SafetensorError: A dtype that safetensors lacks, a name that is reserved, or a file that cannot be written; the
            error of the operating system is its cause.

    Example:
        >>> import fst.numpy, numpy
        >>> fst.numpy.save_file({"a": numpy.arange(3)}, "new.safetensors")
    """
    tensors, path, texts = _tensors_of(tensor_dict), path_of(filename), metadata_of(metadata)
    with safetensors_errors(OSError):
        write_file(tensors, path, texts)


def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file with these arrays.

    Args:
        tensor_dict: As in `save_file`.
        metadata: As in `save_file`.

    Returns:
        The whole file.

    Raises:
        The errors of `save_file`, but for those of the operating system.

    Example:
        >>> import fst.numpy, numpy
        >>> len(fst.numpy.save({"a": numpy.zeros(4, dtype="float32")}))
        80
    """
    return serialize(_tensors_of(tensor_dict), metadata_of(metadata))


def _tensors_of(arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
    if not isinstance(arrays, dict):
        raise TypeError(f"tensor_dict must be a dict of str to arrays, not {type(arrays).__name__}")
    names_of(list(arrays))
    return {name: _tensor_of(name, array) for name, array in arrays.items()}


def _tensor_of(name: str, array: Array) -> torch.Tensor:
    """A tensor with the elements of an array in order; it shares the array's memory where they lie so."""
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(f'tensor "{name}": expected an array of NumPy, not {type(array).__name__}')
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise SafetensorError(f'tensor "{name}": safetensors has no dtype for {array.dtype.name}')
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    if plain.size == 0:
        return torch.empty(plain.shape, dtype=dtype)
    # As bytes, since PyTorch takes no foreign dtypes.
    flat = torch.from_numpy(np.asarray(_Memory(plain)))
    return flat.view(dtype).view(plain.shape)


class _Memory:
    """The bytes of an array as an array that may be written to: PyTorch warns of any other, though it only reads."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (array.nbytes,),
            "data": (array.ctypes.data, False),
        }
