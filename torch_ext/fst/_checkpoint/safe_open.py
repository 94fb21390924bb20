"""An open checkpoint, with the methods of safetensors' class of the same name."""

from types import TracebackType
from typing import Any

import torch

from fst._checkpoint.framework import NUMPY, framework_of
from fst._checkpoint.handle import Handle
from fst._checkpoint.slice import Slice
from fst._core.arguments import Device, Paths, device_of, paths_of
from fst._core.classes import Checkpoint, TensorInfo
from fst._core.errors import SafetensorError


class safe_open:  # noqa: N801  (the name that programs know)
    """Opens files, and reads of them what is asked for.

    The headers are read once, when the files are opened. Each tensor is read when it is asked for, and is then the
    caller's alone: it stays when the files are closed, replaced or deleted. On the CPU tensors of local files are views
    of private mappings, as those of `load_file` are. Any number of threads may use one object.

    Args:
        filename: A file, a directory with one checkpoint, an index file, or a list of these, which are one checkpoint.
        framework: "pt" ("torch", "pytorch") for PyTorch's tensors, or "np" ("numpy") for arrays.
        device: Where tensors go: a name, a `torch.device`, the index of a GPU, or None for the CPU. Arrays are on the
            CPU.
        backend: "mmap" or "pread", which safetensors takes. It changes nothing: fst finds the best way itself, and
            `FST_READER` may choose one.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: What the operating system says.
        SafetensorError: A file is malformed, two files hold the same name, or there is no such framework, device or
            backend.

    Example:
        >>> with fst.safe_open("model.safetensors", framework="pt") as file:
        ...     print(file.keys(), file.get_slice("weight")[1:3, ::2].shape)
        ['bias', 'weight'] torch.Size([2, 2])
    """

    def __init__(
        self, filename: Paths, framework: str = "pt", device: Device = "cpu", *, backend: str = "mmap"
    ) -> None:
        wanted, place = framework_of(framework), _device_of(device)
        if wanted is NUMPY and place.type != "cpu":
            raise SafetensorError(f"arrays of NumPy are on the CPU, and not on {place}")
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is neither "mmap" nor "pread"')
        self._handle: Handle | None = Handle(Checkpoint(paths_of(filename)), wanted, place)

    def keys(self) -> list[str]:
        """The names of all tensors, in the order of the alphabet."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """The names of all tensors, in the order of the files and of their bytes in each."""
        return self._opened().checkpoint.names()

    def metadata(self) -> dict[str, str] | None:
        """The free text that the writers of the files left in the headers; None where they left none.

        Raises SafetensorError where two files give different texts for one key.
        """
        merged: dict[str, str] | None = None
        found_in: dict[str, str] = {}
        for path, texts in self._opened().checkpoint.metadata():
            merged = {} if merged is None else merged
            for key, text in texts.items():
                if merged.setdefault(key, text) != text:
                    raise SafetensorError(
                        f'{path}: the metadata has {text!r} for "{key}", but that of {found_in[key]} has '
                        f"{merged[key]!r}; open the files one by one"
                    )
                found_in.setdefault(key, path)
        return merged

    def get_tensor(self, name: str) -> Any:
        """A whole tensor. Raises SafetensorError, which is a KeyError too, where there is none of this name."""
        return self._opened().load([_checked(name)])[0]

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, in the order of `offset_keys`, with one load."""
        handle = self._opened()
        names = handle.checkpoint.names()
        return dict(zip(names, handle.load(names), strict=True))

    def get_tensor_meta(self, name: str) -> TensorInfo:
        """The dtype and shape as the file has them, and the size in bytes. Reads nothing."""
        return self._opened().checkpoint.tensor_info(_checked(name))

    def get_slice(self, name: str) -> Slice:
        """A tensor to be indexed. It can be used after the file was closed."""
        return Slice(self._opened(), _checked(name))

    def close(self) -> None:
        """Closes the files, once no slice uses them any more. A second time it does nothing."""
        self._handle = None

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Handle:
        if self._handle is None:
            raise SafetensorError("File is closed")
        return self._handle


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
