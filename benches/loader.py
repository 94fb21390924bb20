"""How each library loads a file: one class each, with the same three methods.

Creating a loader imports its library, so an ImportError here means that it is not installed.
Every method returns tensors that stay valid after it returns, as an application needs them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class UnsupportedError(Exception):
    """The library cannot do this; the text says why, for the tables."""


class Loader(Protocol):
    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        """All tensors of the file."""

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        """The named tensors, from opening the file on."""

    def reader(self, path: str, device: str) -> str:
        """How the bytes of such a load are read, for the tables."""


class Fst:
    def __init__(self) -> None:
        import fst

        self._fst = fst

    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._fst.load_file(path, device)

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        return dict(zip(names, self._fst.load_tensors(path, names, device), strict=True))

    def reader(self, path: str, device: str) -> str:
        import torch

        return str(torch.ops.fst.reader([path], device))


class Safetensors:
    def __init__(self) -> None:
        import safetensors.torch

        self._safetensors = safetensors

    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._safetensors.torch.load_file(path, device)

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        with self._safetensors.safe_open(path, framework="pt", device=device) as file:
            return {name: file.get_tensor(name) for name in names}

    def reader(self, path: str, device: str) -> str:
        return "mmap"


class SafetensorsPread(Safetensors):
    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._safetensors.torch.load_file(path, device, backend="pread")

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        with self._safetensors.safe_open(path, framework="pt", device=device, backend="pread") as file:
            return {name: file.get_tensor(name) for name in names}

    def reader(self, path: str, device: str) -> str:
        return "pread"


class SafetensorsPrefetch(Safetensors):
    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._prefetch(path, None, device)

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        return self._prefetch(path, names, device)

    def reader(self, path: str, device: str) -> str:
        return "prefetch"

    def _prefetch(self, path: str, names: Sequence[str] | None, device: str) -> "dict[str, Tensor]":
        if device == "cpu":
            raise UnsupportedError("prefetch loads to CUDA devices only")
        plan = None if names is None else dict.fromkeys(names)
        with self._safetensors.safe_open(path, framework="pt", device=device) as file:
            return dict(file.prefetch(plan))


class Fastsafetensors:
    """Reads into one block for the whole file; the tensors are views that keep it alive."""

    def __init__(self) -> None:
        import fastsafetensors
        from fastsafetensors.common import is_odirect_enabled

        self._fastsafetensors = fastsafetensors
        self._is_direct = is_odirect_enabled

    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._read(path, None, device)

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        return self._read(path, frozenset(names), device)

    def reader(self, path: str, device: str) -> str:
        return "pread, O_DIRECT" if self._is_direct(path, buffered_ram_fs=True) else "pread"

    def _read(self, path: str, names: frozenset[str] | None, device: str) -> "dict[str, Tensor]":
        file_loader = self._fastsafetensors.SafeTensorsFileLoader(None, device, nogds=True)
        file_loader.add_filenames({0: [path]})
        if names is not None:
            file_loader.set_tensor_filter(names.__contains__)
        block = file_loader.copy_files_to_device()
        tensors = {name: block.get_tensor(name) for name in file_loader.get_keys()}
        block.close()
        file_loader.close()
        return tensors


class RunaiStreamer:
    def __init__(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def load(self, path: str, device: str) -> "dict[str, Tensor]":
        return self._stream(path, None, device)

    def select(self, path: str, names: Sequence[str], device: str) -> "dict[str, Tensor]":
        return self._stream(path, names, device)

    def reader(self, path: str, device: str) -> str:
        return "its streamer"

    def _stream(self, path: str, names: Sequence[str] | None, device: str) -> "dict[str, Tensor]":
        with self._streamer() as streamer:
            streamer.stream_file(path, device=device, tensor_names=names)
            return dict(streamer.get_tensors())
