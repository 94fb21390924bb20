"""Loader of a safetensors file: all tensors at once, single tensors, or a stream of batches."""

import logging
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fst
from fst.compat._header import header_entry

logger = logging.getLogger(__name__)

# Bounds of a stream's window: enough to keep the device busy, and not enough to fill the memory.
_WINDOW_BYTES_MIN = 64 << 20
_WINDOW_BYTES_MAX = 512 << 20


class UnifiedSafetensorsLoader:
    """Loads the tensors of a file.

    Tensors own their storage. They stay valid as long as they are referenced, also after `mark_processed` and `close`.
    On the CPU, tensors of local files are views of private mappings: they take memory once they are used, and writing
    to a tensor changes neither the file nor other tensors.

    A loader can be pickled, for example for the workers of a `DataLoader`. Each process opens the file again.

    Args:
        filename: A safetensors file.
        low_memory: False loads all tensors at once and keeps them. True loads each tensor on request.
        direct_gpu: Whether `async_stream` and `load_all` return tensors on the current GPU. Implies `low_memory`.
            Without CUDA the tensors are on the CPU, and a warning is logged.
        use_mmap: No effect: fst maps local files where this is the faster way.

    Raises:
        Errors of `fst.load_file`.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        low_memory: bool = False,
        direct_gpu: bool = False,
        use_mmap: bool = False,
    ) -> None:
        self.filename = filename
        self.low_memory = low_memory or direct_gpu
        self.direct_gpu = direct_gpu and torch.cuda.is_available()
        self.use_mmap = use_mmap
        if direct_gpu and not self.direct_gpu:
            logger.warning("PyTorch finds no GPU; with direct_gpu=True, tensors are on the CPU")
        self._file: fst.safe_open | None = None
        self._metadata = self._opened().metadata() or {}
        self._header = self._read_header()
        self._tensors = {} if self.low_memory else fst.load_file(filename)

    def __enter__(self) -> "UnifiedSafetensorsLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_tensors": {}}

    def close(self) -> None:
        """Closes the file and releases the cached tensors. A later request opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._tensors.clear()

    def keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of their bytes in the file."""
        return [name for name in self._header if name != "__metadata__"]

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of the header."""
        return self._metadata

    def get_tensor(self, key: str) -> Tensor:
        """Returns a tensor on the CPU. Raises KeyError if the file does not hold the name."""
        self._entry(key)
        if self.low_memory:
            return self._loaded(key)
        if key not in self._tensors:
            self._tensors[key] = self._loaded(key)
        return self._tensors[key]

    def mark_processed(self, key: str) -> None:
        """Releases a tensor that is cached with `low_memory=False`. Otherwise has no effect."""
        self._tensors.pop(key, None)

    def load_all(self) -> dict[str, Tensor]:
        """Loads all tensors in one load, and returns them by name."""
        if self.low_memory:
            return fst.load_file(self.filename, self._device())
        return {key: self.get_tensor(key) for key in self.keys()}

    def async_stream(
        self,
        keys: Sequence[str],
        batch_size: int = 1,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields tensors in batches, and loads later batches in the background.

        Args:
            keys: Names of the tensors, in the order in which they are yielded. The order of `keys()` is the fastest.
            batch_size: Number of tensors in a batch. The last batch may have fewer.
            prefetch_batches: Number of batches to load in advance. The window for them has 64 MiB to 512 MiB. A tensor
                larger than the window is loaded alone.
            pin_memory: Whether tensors on the CPU are in pinned memory. No effect without CUDA.

        Yields:
            Lists of pairs of name and tensor. Leaving the loop ends the load.

        Raises:
            KeyError: The file does not hold a name. Nothing was read.
            ValueError: `batch_size` or `prefetch_batches` is less than 1.
        """
        keys = list(keys)
        if batch_size < 1 or prefetch_batches < 1:
            raise ValueError(f"batch_size {batch_size} and prefetch_batches {prefetch_batches} must be 1 or more")
        sizes = [self._bytes_of(key) for key in keys]
        count = batch_size * prefetch_batches
        prefetch_bytes = max((sum(sizes[at : at + count]) for at in range(0, len(sizes), count)), default=0)
        window_bytes = min(max(prefetch_bytes, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
        return self._batches(keys, batch_size, window_bytes, pin_memory and torch.cuda.is_available())

    def _batches(
        self, keys: list[str], batch_size: int, window_bytes: int, pinned: bool
    ) -> Iterator[list[tuple[str, Tensor]]]:
        batch = []
        for key, tensor in self._ordered(keys, window_bytes):
            batch.append((key, tensor.pin_memory() if pinned and tensor.device.type == "cpu" else tensor))
            # The caller holds the only reference while it processes the tensor.
            del tensor
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _ordered(self, keys: list[str], window_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors in the order of `keys`. `fst.stream` yields them in the order of the file."""
        for group in self._groups(keys, window_bytes):
            ready: dict[str, Tensor] = {}
            remaining = iter(group)
            key = next(remaining, None)
            with fst.stream(self.filename, self._device(), group, window_bytes=window_bytes) as tensors:
                for name, tensor in tensors:
                    ready[name] = tensor
                    del tensor
                    while key in ready:
                        yield key, ready.pop(key)
                        key = next(remaining, None)

    def _groups(self, keys: list[str], window_bytes: int) -> Iterator[list[str]]:
        """Yields all keys as one group if they are in the order of the file, or else groups that fit the window."""
        positions = {key: position for position, key in enumerate(self.keys())}
        if all(positions[one] < positions[other] for one, other in pairwise(keys)):
            yield keys
            return
        group: dict[str, None] = {}
        group_bytes = 0
        for key in keys:
            size = self._bytes_of(key)
            if key in group or (group and group_bytes + size > window_bytes):
                yield list(group)
                group, group_bytes = {}, 0
            group[key] = None
            group_bytes += size
        yield list(group)

    def _device(self) -> str:
        return "cuda" if self.direct_gpu else "cpu"

    def _entry(self, key: str) -> dict[str, Any]:
        if key == "__metadata__" or key not in self._header:
            raise KeyError(f'{os.fspath(self.filename)}: no tensor is named "{key}"')
        entry: dict[str, Any] = self._header[key]
        return entry

    def _bytes_of(self, key: str) -> int:
        begin, end = self._entry(key)["data_offsets"]
        return int(end - begin)

    def _loaded(self, key: str) -> Tensor:
        tensor: Tensor = self._opened().get_tensor(key)
        return tensor

    def _opened(self) -> "fst.safe_open":
        """Returns the open file. Opens it on first use, after `close`, and in another process."""
        if self._file is None:
            self._file = fst.safe_open(self.filename, framework="pt", device="cpu")
        return self._file

    def _read_header(self) -> dict[str, Any]:
        """Returns the header in the form of its JSON, which programs access."""
        metadata: dict[str, Any] = {"__metadata__": self._metadata} if self._metadata else {}
        file = self._opened()
        metas = {name: file.get_tensor_meta(name) for name in file.offset_keys()}
        return metadata | {
            name: header_entry(meta.dtype, meta.shape, meta.data_offsets) for name, meta in metas.items()
        }
