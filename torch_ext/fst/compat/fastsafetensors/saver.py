"""Saves tensors in several files of about equal size."""

import errno
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import Path, path_of
from fst._core.dtypes import PACKED, shape_in_torch
from fst._core.urls import is_remote, local_path_of
from fst.compat.fastsafetensors.frameworks import TensorBase, check_framework
from fst.compat.fastsafetensors.st_types import DType, as_torch_dtype

# Metadata of each file: its number from 0, the number of files, and a text that only files of the same save share.
_KEYS = ("fst.shard.index", "fst.shard.count", "fst.shard.set")


@dataclass
class WriteEntry:
    """Tensor to save.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype in the file.
        shape: Shape in the header.
        nbytes: Size in bytes.
        source: A PyTorch tensor or a `TensorBase`. With a fill function any object, which only that function uses.
    """

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None


# Writes the bytes of all entries into memory, and keeps no reference to it. The largest entries come first.
FillFn = Callable[[list[tuple[memoryview, WriteEntry]]], None]
# Returns metadata for a file with these entries.
ShardMetadataFn = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


class ParallelSaver:
    """Saves tensors in several files of about equal size: the largest first, each to the file with the fewest bytes.

    Args:
        num_shards: Number of files.
        framework: Framework of the sources.
        num_threads: No effect.
        shard_metadata: Returns further metadata of a file.
        fill: Writes the bytes of all entries, in host memory for all of them together. None saves the tensors that are
            the sources, in bounded memory.
        min_free_bytes: Bytes that must be free in the directory, in addition to the tensors.
        fsync: Whether to flush the directory too.

    Raises:
        ValueError: `num_shards` or `num_threads` is less than 1.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: ShardMetadataFn | None = None,
        fill: FillFn | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
    ) -> None:
        if num_shards < 1 or num_threads < 1:
            raise ValueError(f"num_shards {num_shards} and num_threads {num_threads} must be at least 1")
        self.num_shards = num_shards
        self.framework = framework
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
        self.fill = fill
        self.min_free_bytes = min_free_bytes
        self.fsync = fsync

    def save(
        self,
        tensors: Mapping[str, Tensor | TensorBase],
        base: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves tensors by name, and returns the paths. The arguments are those of `save_entries`.

        Raises:
            NotImplementedError: The framework is not PyTorch.
            Errors of `save_entries`.
        """
        check_framework(self.framework)
        entries = []
        for name, tensor in tensors.items():
            wrapped = _wrap(tensor)
            entries.append(WriteEntry(name, wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes(), tensor))
        return self.save_entries(
            entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves entries, and returns the paths. Creates the directory.

        All files are written and flushed under temporary names beside their paths, and then renamed. If the save fails,
        the temporary files are removed.

        Args:
            entries: The tensors.
            base: Path of the files without their suffix, such as "-00001-of-00016.safetensors".
            metadata: Metadata of each file.
            shard0_metadata: Further metadata of the first file.
            header_align: Alignment of the headers' lengths. Only 8 is supported.

        Raises:
            ValueError: The path is a URL, or an entry or the metadata is not valid.
            NotImplementedError: PyTorch has no dtype for an entry, or `header_align` is not 8.
            OSError: There is not enough space, or the operating system reported another error.
            Errors of `fst.Writer` and of `fill`.
        """
        base = path_of(base)
        if is_remote(base):
            raise ValueError(f"{base}: only local files are saved here; use fst.save_file with max_shard_bytes")
        if header_align != 8:
            raise NotImplementedError(f"fst aligns headers to 8 bytes; header_align={header_align} is not supported")
        for entry in entries:
            _check_entry(entry)
        if len({entry.name for entry in entries}) < len(entries):
            raise ValueError("the names of the entries must be unique")
        shards = _distribute(entries, self.num_shards)
        texts = self._metadata(shards, metadata or {}, shard0_metadata or {})
        base = local_path_of(base) if base.startswith("file://") else base
        directory = os.path.dirname(os.path.abspath(base))
        os.makedirs(directory, exist_ok=True)
        needed = self.min_free_bytes + sum(entry.nbytes for entry in entries)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"not enough space: {needed} bytes are needed, {free} are free", directory)
        filled = None if self.fill is None else _filled(entries, self.fill)
        paths = [f"{base}-{number:05}-of-{self.num_shards:05}.safetensors" for number in range(1, self.num_shards + 1)]
        save = uuid.uuid4().hex
        temporary = {path: f"{path}.tmp.{save}" for path in paths}
        try:
            for path, shard, text in zip(paths, shards, texts, strict=True):
                with fst.Writer(temporary[path], text) as writer:
                    for entry in shard:
                        writer.write(entry.name, _tensor_of(entry) if filled is None else filled.pop(entry.name))
            for path, file in temporary.items():
                os.replace(file, path)
        finally:
            for file in temporary.values():
                if os.path.lexists(file):
                    os.unlink(file)
        if self.fsync:
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return paths

    def _metadata(
        self, shards: Sequence[Sequence[WriteEntry]], common: Mapping[str, str], first: Mapping[str, str]
    ) -> list[dict[str, str]]:
        """Returns the metadata of each file."""
        shard_set = uuid.uuid4().hex
        found = []
        for index, shard in enumerate(shards):
            further = {} if self.shard_metadata is None else dict(self.shard_metadata(tuple(shard)))
            if any(key in _KEYS for key in further):
                raise ValueError(f"the keys {', '.join(_KEYS)} are reserved; shard_metadata returned {further}")
            own = dict(zip(_KEYS, (str(index), str(len(shards)), shard_set), strict=True))
            texts = {**common, **(first if index == 0 else {}), **own, **further}
            if not all(isinstance(text, str) for item in texts.items() for text in item):
                raise ValueError(f"keys and values of metadata must be strings: {texts}")
            found.append(texts)
        return found


def _distribute(entries: Sequence[WriteEntry], count: int) -> list[list[WriteEntry]]:
    """Distributes entries over files."""
    shards: list[list[WriteEntry]] = [[] for _ in range(count)]
    sizes = [0] * count
    for entry in _largest_first(entries):
        emptiest = sizes.index(min(sizes))
        shards[emptiest].append(entry)
        sizes[emptiest] += entry.nbytes
    return shards


def _largest_first(entries: Sequence[WriteEntry]) -> list[WriteEntry]:
    return sorted(entries, key=lambda entry: -entry.nbytes)


def _wrap(tensor: Tensor | TensorBase) -> TensorBase:
    return tensor if isinstance(tensor, TensorBase) else TensorBase(tensor)


def _check_entry(entry: WriteEntry) -> None:
    dtype = as_torch_dtype(entry.dtype)
    if dtype is None or entry.name == "__metadata__":
        raise ValueError(f'"{entry.name}": {entry.dtype.value} is no dtype of a file, or the name is reserved')
    if any(size < 0 for size in entry.shape):
        raise ValueError(f'"{entry.name}": the shape must be nonnegative, not {entry.shape}')
    if entry.dtype.value == PACKED and (not entry.shape or entry.shape[-1] % 2):
        raise ValueError(f'"{entry.name}": the last dimension of an F4 tensor must be even, not {entry.shape}')
    expected = math.prod(shape_in_torch(entry.dtype.value, entry.shape)) * dtype.itemsize
    if expected != entry.nbytes:
        raise ValueError(f'"{entry.name}": {entry.dtype.value} {entry.shape} has {expected} bytes, not {entry.nbytes}')


def _tensor_of(entry: WriteEntry) -> Tensor:
    """Returns the source of an entry, whose bytes count. The entry's dtype and shape may be others."""
    source = _wrap(entry.source).detach()
    if (source.dtype, source.get_shape()) == (entry.dtype, entry.shape):
        return source.get_raw()
    return _interpret(source.get_raw().reshape(-1).view(torch.uint8), entry)


def _filled(entries: Sequence[WriteEntry], fill: FillFn) -> dict[str, Tensor]:
    """Returns the tensors that a fill function writes."""
    data = {entry.name: torch.empty(entry.nbytes, dtype=torch.uint8) for entry in entries}
    fill([(data[entry.name].numpy().data, entry) for entry in _largest_first(entries)])
    return {entry.name: _interpret(data[entry.name], entry) for entry in entries}


def _interpret(data: Tensor, entry: WriteEntry) -> Tensor:
    """Views bytes as the tensor of an entry."""
    if data.nbytes != entry.nbytes:
        raise ValueError(f'"{entry.name}": the source has {data.nbytes} bytes, and the entry {entry.nbytes}')
    return TensorBase(data).view(entry.dtype).get_raw().reshape(shape_in_torch(entry.dtype.value, entry.shape))
