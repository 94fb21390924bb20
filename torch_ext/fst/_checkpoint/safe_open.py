"""`safe_open`: an open checkpoint with the methods of safetensors' class of the same name."""

from types import TracebackType
from typing import Any

import torch

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.framework import NUMPY, Output, find_framework
from fst._checkpoint.slice import Slice
from fst._core.arguments import Device, Paths, device_of
from fst._core.classes import TensorInfo
from fst._core.errors import SafetensorError


class safe_open:  # noqa: N801  (the name of safetensors' class)
    """Opens a checkpoint, and loads tensors and parts of tensors on request.

    Opening reads the headers once. Each tensor is read when it is requested. Tensors own their storage: they stay valid
    after the files are closed, replaced or deleted. On the CPU, tensors of local files are views of private mappings,
    as those of `load_file`. Any number of threads may use one object.

    Args:
        filename: A file, a directory with one checkpoint, an index file, or a list of these, which together are one
            checkpoint.
        framework: "pt" ("torch", "pytorch") for PyTorch tensors, or "np" ("numpy") for NumPy arrays.
        device: Device of the tensors: a name, a `torch.device`, the index of a GPU, or None for the CPU. NumPy arrays
            are always on the CPU.
        backend: "mmap" or "pread", for compatibility with safetensors. It has no effect: fst chooses the reader, and
            `FST_READER` overrides the choice.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The operating system reports an error.
        SafetensorError: A file is malformed, two files hold the same name, or the framework, the device or the backend
            does not exist.

    Example:
        >>> with fst.safe_open("model.safetensors", framework="pt") as file:
        ...     print(file.keys(), file.get_slice("weight")[1:3, ::2].shape)
        ['bias', 'weight'] torch.Size([2, 2])
    """

    def __init__(
        self, filename: Paths, framework: str = "pt", device: Device = "cpu", *, backend: str = "mmap"
    ) -> None:
        output = Output(find_framework(framework), _device_of(device))
        if output.framework is NUMPY and output.device.type != "cpu":
            raise SafetensorError(f'NumPy arrays are on the CPU, not on {output.device}; give device="cpu"')
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is neither "mmap" nor "pread"')
        self._output = output
        # None after `close`.
        self._checkpoint: OpenCheckpoint | None = OpenCheckpoint(filename)

    def keys(self) -> list[str]:
        """Returns the names of all tensors in alphabetical order."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of the files and of the bytes in each file."""
        return self._opened().names()

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata of the files, merged, or None if no file has any.

        Raises:
            SafetensorError: Two files have different values for one key.
        """
        merged: dict[str, str] | None = None
        found_in: dict[str, str] = {}
        for path, metadata in self._opened().metadata():
            merged = {} if merged is None else merged
            for key, value in metadata.items():
                if merged.setdefault(key, value) != value:
                    raise SafetensorError(
                        f'{path}: the metadata has {value!r} for "{key}", but that of {found_in[key]} has '
                        f"{merged[key]!r}; open the files one by one"
                    )
                found_in.setdefault(key, path)
        return merged

    def get_tensor(self, name: str) -> Any:
        """Loads a whole tensor.

        Raises:
            SafetensorError: No file holds the name. The exception is also a KeyError.
        """
        return self._load([_checked(name)])[0]

    def get_tensors(self) -> dict[str, Any]:
        """Loads all tensors in one load, and returns them by name in the order of `offset_keys`."""
        names = self._opened().names()
        return dict(zip(names, self._load(names), strict=True))

    def get_tensor_meta(self, name: str) -> TensorInfo:
        """Returns dtype and shape of a tensor as in the header, and its size in bytes. Reads nothing."""
        return self._opened().tensor_info(_checked(name))

    def get_slice(self, name: str) -> Slice:
        """Returns an object that loads parts of a tensor by indexing. It stays usable after the files are closed."""
        return Slice(self._opened(), self._output, _checked(name))

    def close(self) -> None:
        """Closes the files as soon as no slice uses them. Closing again has no effect."""
        self._checkpoint = None

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, names: list[str]) -> list[Any]:
        return self._output.convert(self._opened().load_tensors(names, self._output.load_device))

    def _opened(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise SafetensorError("File is closed")
        return self._checkpoint


def _checked(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be a str, not {type(name).__name__}")
    return name


def _device_of(device: Device) -> torch.device:
    if device is None:
        return torch.device("cpu")
    try:
        return torch.device(device_of(device))
    except RuntimeError as error:
        raise SafetensorError(f"device {device!r} is invalid: {error}") from None
