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

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._core import ops
from fst._core.arguments import Device, Path, Paths, device_of, dtype_of, list_of, names_of, path_of, paths_of
from fst._load.progress import load_with_bar


def load_file(
    path: Path, device: Device = "cpu", *, dtype: torch.dtype | None = None, progress: bool = False
) -> dict[str, Tensor]:
    """Loads every tensor of a checkpoint.

    Args:
        path: A file, a directory with one checkpoint, or an index file.
        device: Where the tensors go: "cpu", "cuda" (the current GPU), "cuda:1", a `torch.device`, the index of a GPU,
            or None for PyTorch's default device. "meta" reads the headers only.
        dtype: A floating-point dtype to cast to the tensors that are stored as F16, BF16, F32 or F64. All others keep
            their dtype: integers, bools, complex numbers and the 8-bit and 4-bit floats.
        progress: Shows a bar of bytes while it loads, which needs tqdm. Programs that are compiled or exported show
            none. Mapped files need no reading, so a load of them to the CPU is over at once.

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
        ImportError: tqdm is not installed, and `progress` asks for it.
        torch.OutOfMemoryError: The device has no room for the tensors.
        KeyboardInterrupt: Ctrl-C; whatever was loaded so far is released.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> weights["weight"].shape, weights["weight"].dtype
        (torch.Size([4, 3]), torch.bfloat16)
    """
    if progress and not torch.compiler.is_compiling():
        return dict(load_with_bar([path_of(path)], device_of(device), dtype=dtype_of(dtype)))
    return ops.load_file(path_of(path), device_of(device), dtype=dtype_of(dtype))


def load_files(
    paths: Paths, device: Device = "cpu", *, dtype: torch.dtype | None = None, progress: bool = False
) -> dict[str, Tensor]:
    """Loads every tensor of several files into one dictionary.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        device: As in `load_file`.
        dtype: As in `load_file`.
        progress: As in `load_file`.

    Returns:
        The tensors by name, in the order of the files and of their bytes in each.

    Raises:
        The errors of `load_file`.

    Example:
        >>> sorted(fst.load_files(["model.safetensors"]))
        ['bias', 'weight']
    """
    if progress and not torch.compiler.is_compiling():
        return dict(load_with_bar(paths_of(paths), device_of(device), dtype=dtype_of(dtype)))
    return ops.load_files(paths_of(paths), device_of(device), dtype=dtype_of(dtype))


def load_tensors(
    paths: Paths,
    names: Sequence[str],
    device: Device = "cpu",
    *,
    dtype: torch.dtype | None = None,
    progress: bool = False,
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
        progress: As in `load_file`.

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
    if progress and not torch.compiler.is_compiling():
        named = load_with_bar(paths_of(paths), device_of(device), names_of(names), dtype=dtype_of(dtype))
        return [tensor for _, tensor in named]
    return ops.load_tensors(paths_of(paths), names_of(names), device_of(device), dtype=dtype_of(dtype))


def load_slices(
    paths: Paths,
    names: Sequence[str],
    dims: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: Device = "cpu",
    *,
    dtype: torch.dtype | None = None,
    progress: bool = False,
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
        progress: As in `load_file`.

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
    slices = {
        "dims": list_of(dims, int, "dims"),
        "starts": list_of(starts, int, "starts"),
        "lengths": list_of(lengths, int, "lengths"),
    }
    if progress and not torch.compiler.is_compiling():
        named = load_with_bar(paths_of(paths), device_of(device), names_of(names), dtype=dtype_of(dtype), **slices)
        return [tensor for _, tensor in named]
    return ops.load_slices(paths_of(paths), names_of(names), device=device_of(device), dtype=dtype_of(dtype), **slices)


def load_boxes(
    paths: Paths,
    names: Sequence[str],
    boxes: Sequence[Sequence[tuple[int, int, int]]],
    device: Device = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Loads a box of each tensor that is named, and reads only the bytes that the boxes need.

    A box takes of each dimension `length` indices: `start`, `start + step`, and so on. Like `load_tensors` it can be
    compiled and exported. To index tensors as one is used to, see `safe_open`.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to take boxes of.
        boxes: For each name, and for each dimension of its tensor as PyTorch has it, `(start, length, step)`. None is
            negative, the step is at least 1, and all indices lie inside the dimension.
        device: As in `load_file`.
        dtype: As in `load_file`.

    Returns:
        One contiguous tensor for each name, in their order. The shape is the lengths.

    Raises:
        KeyError: No file holds the name; the message tells the nearest names.
        ValueError: A box does not fit its tensor, or there is not one for each name.
        And the errors of `load_file`.

    Example:
        >>> [corners] = fst.load_boxes("model.safetensors", ["weight"], [[(0, 2, 3), (0, 2, 2)]])
        >>> corners.shape
        torch.Size([2, 2])
    """
    if len(boxes) != len(names):
        raise ValueError(f"{len(names)} names, but {len(boxes)} boxes; give one for every name")
    return ops.load_boxes(paths_of(paths), names_of(names), boxes, device_of(device), dtype=dtype_of(dtype))


def load_into(paths: Paths, names: Sequence[str], out: Sequence[Tensor]) -> None:
    """Overwrites existing tensors in place, so that their addresses stay.

    All names, shapes and dtypes are checked before anything is written. It can be compiled and exported, also where the
    checkpoint is not at hand. It shows no bar: what does makes tensors of its own, and here there are to be none.

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
    ops.load_into(paths_of(paths), names_of(names), list_of(out, Tensor, "out"))


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
    return ops.tensor_names(paths_of(paths))


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
    return ops.metadata(path_of(path))
