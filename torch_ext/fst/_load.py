"""The public functions: what people pass, turned into what the operators take.

A path is a safetensors file, a directory that holds one checkpoint (`*.safetensors` files, with or without an index
file), or the index file `*.safetensors.index.json` of a sharded checkpoint. Where several paths may stand, the tensors
of all of them together are the checkpoint, and a name may stand in one file only.

Every tensor returned owns its memory and is ready on the current stream. On the CPU, tensors of local files are views
of private mappings: they take memory when they are used, and writing to one changes neither the file nor any other
tensor. Files on network and FUSE file systems are read instead.

The examples below use a file `model.safetensors` that holds the F32 tensors `weight` of shape [4, 3] and `bias` of
shape [4].
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

import fst._graph  # noqa: F401  (registers the operators, and what compilers need)
from fst._errors import call

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
Device = torch.device | str | int | None

_Item = TypeVar("_Item")


def load_file(path: Path, device: Device = "cpu", *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Loads every tensor of a checkpoint.

    Args:
        path: A file, a directory with one checkpoint, or an index file.
        device: Where the tensors go: "cpu", "cuda" (the current GPU), "cuda:1", a `torch.device`, the index of a GPU,
            or None for PyTorch's default device. "meta" reads the headers only.
        dtype: A floating-point dtype to cast to the tensors that are stored as F16, BF16, F32 or F64. All others keep
            their dtype: integers, bools, complex numbers and the 8-bit and 4-bit floats.

    Returns:
        The tensors by name, in the order of their bytes in the file. Their shapes are those of the file, except that
        PyTorch keeps two F4 numbers in one element, which halves the last dimension.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: What the operating system says. A directory
            without safetensors is an IsADirectoryError.
        SafetensorError: A file is malformed or cut off, or two files hold the same name.
        NotImplementedError: PyTorch has no dtype for one of the tensors (F6_E2M3, F6_E3M2). The others can be loaded
            by name.
        ValueError: There is no such device, or `dtype` is not floating point.
        torch.OutOfMemoryError: The device has no room for the tensors.
        KeyboardInterrupt: Ctrl-C; whatever was loaded so far is released.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> weights["weight"].shape, weights["weight"].dtype
        (torch.Size([4, 3]), torch.bfloat16)
    """
    loaded: dict[str, Tensor] = call(torch.ops.fst.load_file, _path(path), _device(device), dtype=_dtype(dtype))
    return loaded


def load_files(paths: Paths, device: Device = "cpu", *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Loads every tensor of several files into one dictionary.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        device: As in `load_file`.
        dtype: As in `load_file`.

    Returns:
        The tensors by name, in the order of the files and of their bytes in each.

    Raises:
        The errors of `load_file`.

    Example:
        >>> sorted(fst.load_files(["model.safetensors"]))
        ['bias', 'weight']
    """
    loaded: dict[str, Tensor] = call(torch.ops.fst.load_files, _paths(paths), _device(device), dtype=_dtype(dtype))
    return loaded


def load_tensors(
    paths: Paths, names: Sequence[str], device: Device = "cpu", *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Loads the tensors that are named, and reads nothing else but the headers.

    With paths given as str it can stand in programs for `torch.compile(fullgraph=True)`, `torch.export` and
    AOTInductor, which learn the shapes and dtypes from the headers when they compile. A compiled or exported program
    keeps to those, so compile it anew when its files are replaced by others with other shapes or dtypes.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to load. The same name twice gives two separate tensors.
        device: As in `load_file`.
        dtype: As in `load_file`.

    Returns:
        One tensor for each name, in their order.

    Raises:
        KeyError: No file holds the name; the message tells the nearest names.
        And the errors of `load_file`.

    Example:
        >>> bias, weight = fst.load_tensors("model.safetensors", ["bias", "weight"])
        >>> bias.shape, weight.shape
        (torch.Size([4]), torch.Size([4, 3]))
    """
    loaded: list[Tensor] = call(
        torch.ops.fst.load_tensors, _paths(paths), _names(names), _device(device), dtype=_dtype(dtype)
    )
    return loaded


def load_slices(
    paths: Paths,
    names: Sequence[str],
    dims: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: Device = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Loads a slice of each tensor that is named, and reads only the bytes that the slices need.

    The result is `tensor.narrow(dim, start, length)` of each tensor, contiguous. Like `load_tensors` it can be compiled
    and exported.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to slice.
        dims: The dimension to slice of each; a negative one counts from the last.
        starts: The first index of each slice, from 0 to the size of the dimension, in elements of the tensor as
            PyTorch has it.
        lengths: The number of indices of each slice; start + length is at most the size of the dimension.
        device: As in `load_file`.
        dtype: As in `load_file`.

    Returns:
        One tensor for each name, in their order.

    Raises:
        KeyError: No file holds the name; the message tells the nearest names.
        ValueError: A slice does not fit its tensor, or the lists are not of one length.
        And the errors of `load_file`.

    Example:
        >>> rows, columns = fst.load_slices(
        ...     "model.safetensors", ["weight", "weight"], dims=[0, -1], starts=[2, 0], lengths=[2, 1]
        ... )
        >>> rows.shape, columns.shape
        (torch.Size([2, 3]), torch.Size([4, 1]))
    """
    loaded: list[Tensor] = call(
        torch.ops.fst.load_slices,
        _paths(paths),
        _names(names),
        _list(dims, int, "dims"),
        _list(starts, int, "starts"),
        _list(lengths, int, "lengths"),
        _device(device),
        dtype=_dtype(dtype),
    )
    return loaded


def load_into(paths: Paths, names: Sequence[str], out: Sequence[Tensor]) -> None:
    """Overwrites existing tensors in place, so that their addresses stay.

    All names, shapes and dtypes are checked before anything is written. It can be compiled and exported, also where the
    checkpoint is not at hand.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to load.
        out: For each name, a tensor of the stored shape and dtype, on the CPU or a GPU. It may be non-contiguous, a
            view, or a parameter; autograd records nothing.

    Raises:
        KeyError: No file holds the name; the message tells the nearest names.
        ValueError: A shape or dtype differs from the stored one, or the lists are not of one length. Nothing was
            written.
        And the errors of `load_file`.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> address = linear.weight.data_ptr()
        >>> fst.load_into("model.safetensors", ["weight", "bias"], [linear.weight, linear.bias])
        >>> linear.weight.data_ptr() == address
        True
    """
    call(torch.ops.fst.load_into, _paths(paths), _names(names), _list(out, Tensor, "out"))


def tensor_names(paths: Paths) -> list[str]:
    """The names of all tensors, in the order of the files and of their bytes in each. Reads the headers only.

    Args:
        paths: A path or a list of paths, each as in `load_file`.

    Raises:
        The errors of `load_file` that concern paths and headers.

    Example:
        >>> fst.tensor_names("model.safetensors")
        ['bias', 'weight']
    """
    names: list[str] = call(torch.ops.fst.tensor_names, _paths(paths))
    return names


def metadata(path: Path) -> dict[str, str]:
    """The free text that the writer of a file left in its header.

    Args:
        path: One file, or a directory or an index that leads to one.

    Raises:
        IsADirectoryError: The path leads to several files, each of which has its own.
        And the errors of `load_file` that concern paths and headers.

    Example:
        >>> fst.metadata("model.safetensors")
        {'format': 'pt'}
    """
    texts: dict[str, str] = call(torch.ops.fst.metadata, _path(path))
    return texts


def _path(path: Path) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path must be a str or an os.PathLike, not {type(path).__name__}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be text, not {type(text).__name__}")
    return _utf8(text)


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"paths and names must be UTF-8, which {text!r} is not") from None
    return text


def _paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        return [_path(paths)]
    if not isinstance(paths, list | tuple):
        raise TypeError(f"paths must be a path, or a list or tuple of paths, not {type(paths).__name__}")
    return [_path(path) for path in paths]


def _names(names: Sequence[str]) -> list[str]:
    return [_utf8(name) for name in _list(names, str, "names")]


def _list(values: Sequence[_Item], item: type[_Item], what: str) -> list[_Item]:
    # A str is a sequence of str too, but never what is meant; a generator would be empty the second time.
    if not isinstance(values, list | tuple):
        raise TypeError(f"{what} must be a list or tuple of {item.__name__}, not {type(values).__name__}")
    for value in values:
        if not isinstance(value, item):
            raise TypeError(f"{what} must hold {item.__name__} only, not {type(value).__name__}")
    return list(values)


def _device(device: Device) -> torch.device | str:
    if device is None:
        return torch.get_default_device()
    if isinstance(device, int):
        device = torch.device("cuda", device)
    if not isinstance(device, torch.device | str):
        raise TypeError(f"device must be a torch.device, str, int or None, not {type(device).__name__}")
    if str(device).startswith("cuda") and not torch.compiler.is_compiling() and torch.cuda.is_available():
        # The operator starts CUDA behind the back of torch.cuda, whose statistics would then stay at zero.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return device


def _dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype must be a torch.dtype or None, not {type(dtype).__name__}")
    return dtype
