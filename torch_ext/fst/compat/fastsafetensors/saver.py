"""Saves tensors in several files of about equal size."""

import errno
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import Path, is_url, path_of
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata
from fst.compat.fastsafetensors.st_types import DTYPE_SIZES, DType, as_torch_dtype

# Metadata of each file: its number from 0, the number of files, and a text that only files of the same save share.
KEY_SHARD_INDEX = "fst.shard.index"
KEY_SHARD_COUNT = "fst.shard.count"
KEY_SHARD_SET = "fst.shard.set"
_KEYS = (KEY_SHARD_INDEX, KEY_SHARD_COUNT, KEY_SHARD_SET)


class ShardSetError(ValueError):
    """Files are not all the files of one save, in their order."""


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


@dataclass
class ShardPlan:
    """File to save, with its tensors in their order and its metadata."""

    path: str
    entries: list[WriteEntry]
    metadata: dict[str, str]


# Writes the bytes of all entries into memory, and keeps no reference to it. The largest entries come first.
FillFn = Callable[[list[tuple[memoryview, WriteEntry]]], None]
# Returns metadata for a file with these entries.
ShardMetadataFn = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


def plain_entry(name: str, tensor: Tensor | TensorBase, *, framework: str = "pytorch") -> WriteEntry:
    """Returns the entry of a tensor, which becomes its source."""
    wrapped = _wrap(tensor, framework)
    return WriteEntry(name, wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes(), tensor)


def shard_paths(base: Path, num_shards: int) -> list[str]:
    """Returns the paths of the files for a path without suffix."""
    _check_positive("num_shards", num_shards)
    return [f"{path_of(base)}-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]


def validate_shard_set(metas: Sequence[SafeTensorsMetadata]) -> None:
    """Checks that headers are those of all files of one save, in their order. Raises ShardSetError."""
    if not metas:
        raise ShardSetError("there are no files")
    for position, meta in enumerate(metas):
        if any(key not in meta.metadata for key in _KEYS):
            raise ShardSetError(
                f"{meta.src}: the file is not one of a set; its metadata lacks one of {', '.join(_KEYS)}"
            )
        index, count, _ = (meta.metadata[key] for key in _KEYS)
        if (index, count) != (str(position), str(len(metas))):
            raise ShardSetError(
                f"{meta.src}: the file has the number {index} of {count}, expected {position} of {len(metas)}"
            )
        if meta.metadata[KEY_SHARD_SET] != metas[0].metadata[KEY_SHARD_SET]:
            raise ShardSetError(f"{metas[0].src} and {meta.src} were saved separately")


def plan_shards(
    entries: Sequence[WriteEntry],
    paths: Sequence[Path],
    *,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[ShardPlan]:
    """Distributes tensors over files: the largest first, each to the file with the fewest bytes.

    Args:
        entries: The tensors.
        paths: The files.
        metadata: Metadata of each file.
        shard0_metadata: Further metadata of the first file.
        shard_metadata: Returns further metadata of a file.
        header_align: Alignment of the headers' lengths. Only 8 is supported.

    Raises:
        ValueError: An argument is not valid.
        NotImplementedError: PyTorch has no dtype for an entry, or `header_align` is a larger multiple of 8.
    """
    files = [path_of(path) for path in paths]
    if not files or len({os.path.abspath(file) for file in files}) < len(files):
        raise ValueError("paths must be unique, and at least one")
    if header_align < 8 or header_align % 8:
        raise ValueError(f"header_align must be a positive multiple of 8, not {header_align}")
    if header_align > 8:
        raise NotImplementedError(f"fst aligns headers to 8 bytes; header_align={header_align} is not supported")
    names: set[str] = set()
    for entry in entries:
        if entry.name in names or entry.name == "__metadata__":
            raise ValueError(f'"{entry.name}" is given twice, or a reserved name')
        names.add(entry.name)
        _check_entry(entry)
    members: list[list[WriteEntry]] = [[] for _ in files]
    loads = [0] * len(files)
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        emptiest = loads.index(min(loads))
        members[emptiest].append(entry)
        loads[emptiest] += entry.nbytes
    shard_set = uuid.uuid4().hex
    plans = []
    for index, (file, shard) in enumerate(zip(files, members, strict=True)):
        texts = {**(metadata or {}), **((shard0_metadata or {}) if index == 0 else {})}
        texts |= dict(zip(_KEYS, (str(index), str(len(files)), shard_set), strict=True))
        further = {} if shard_metadata is None else dict(shard_metadata(tuple(shard)))
        if any(key in _KEYS for key in further):
            raise ValueError(f"the keys {', '.join(_KEYS)} are reserved; shard_metadata returned {further}")
        texts |= further
        if not all(isinstance(text, str) for item in texts.items() for text in item):
            raise ValueError(f"keys and values of metadata must be strings: {texts}")
        plans.append(ShardPlan(file, shard, texts))
    return plans


def write_shards(
    plans: Sequence[ShardPlan],
    fill: FillFn | None = None,
    *,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
) -> list[str]:
    """Saves files, and returns their paths. Creates their directories.

    All files are written and flushed under temporary names beside their paths, and then renamed. If the save fails,
    the temporary files are removed.

    Args:
        plans: The files.
        fill: Writes the bytes of all entries, in host memory for all of them together. None saves the tensors that are
            the sources, in bounded memory.
        framework: Framework of the sources.
        min_free_bytes: Bytes that must be free in each directory, in addition to the tensors.
        fsync: Whether to flush the directories too.

    Raises:
        ValueError: A path is a URL.
        OSError: There is not enough space, or the operating system reported another error.
        Errors of `fst.Writer` and of `fill`.
    """
    urls = [plan.path for plan in plans if is_url(plan.path)]
    if urls:
        raise ValueError(f"{urls[0]}: only local files are saved here; use fst.save_file with max_shard_bytes")
    needed = min_free_bytes + sum(entry.nbytes for plan in plans for entry in plan.entries)
    directories = {os.path.dirname(os.path.abspath(plan.path)) for plan in plans}
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"not enough space: {needed} bytes are needed, {free} are free", directory)
    filled = None if fill is None else _fill(plans, fill)
    write = uuid.uuid4().hex
    temporary = {plan.path: f"{plan.path}.tmp.{write}" for plan in plans}
    try:
        for plan in plans:
            with fst.Writer(temporary[plan.path], plan.metadata) as writer:
                for entry in plan.entries:
                    tensor = _tensor_of(entry, framework) if filled is None else filled.pop(entry.name)
                    writer.write(entry.name, tensor)
        for path, file in temporary.items():
            os.replace(file, path)
    finally:
        for file in temporary.values():
            if os.path.lexists(file):
                os.unlink(file)
    for directory in directories if fsync else ():
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return list(temporary)


def per_entry_fill(fn: Callable[[memoryview, WriteEntry], None], num_threads: int = 8) -> FillFn:
    """Returns a fill function that calls `fn` for each entry, in several threads."""
    _check_positive("num_threads", num_threads)

    def fill(work: list[tuple[memoryview, WriteEntry]]) -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(fn, buffer, entry) for buffer, entry in work]:
                done.result()

    return fill


def tensor_fill(num_threads: int = 8, *, framework: str = "pytorch") -> FillFn:
    """Returns a fill function for entries whose sources are tensors."""
    return per_entry_fill(lambda buffer, entry: _wrap(entry.source, framework).copy_to_buffer(buffer), num_threads)


def save_sharded(
    entries: Sequence[WriteEntry],
    base: Path,
    *,
    num_shards: int = 16,
    fill: FillFn | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[str]:
    """Saves tensors in the files of `shard_paths`, with the arguments of `plan_shards` and `write_shards`."""
    plans = plan_shards(
        entries,
        shard_paths(base, num_shards),
        metadata=metadata,
        shard0_metadata=shard0_metadata,
        shard_metadata=shard_metadata,
        header_align=header_align,
    )
    return write_shards(plans, fill, framework=framework, min_free_bytes=min_free_bytes, fsync=fsync)


class ParallelSaver:
    """Saves tensors in several files of about equal size.

    Args:
        num_shards: Number of files.
        num_threads: No effect.
        framework, shard_metadata, fill, min_free_bytes, fsync: As in `save_sharded`.

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
        _check_positive("num_shards", num_shards)
        _check_positive("num_threads", num_threads)
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
        """Saves tensors by name, and returns the paths. The arguments are those of `save_sharded`."""
        return self.save_entries(
            [plain_entry(name, tensor, framework=self.framework) for name, tensor in tensors.items()],
            base,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            header_align=header_align,
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
        """Saves entries, and returns the paths. The arguments are those of `save_sharded`."""
        return save_sharded(
            entries,
            base,
            num_shards=self.num_shards,
            fill=self.fill,
            framework=self.framework,
            min_free_bytes=self.min_free_bytes,
            fsync=self.fsync,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            shard_metadata=self.shard_metadata,
            header_align=header_align,
        )


def _wrap(tensor: Tensor | TensorBase, framework: str) -> TensorBase:
    return tensor if isinstance(tensor, TensorBase) else get_framework_op(framework).wrap_tensor(tensor)


def _check_positive(argument: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, not {value}")


def _check_entry(entry: WriteEntry) -> None:
    if entry.dtype is DType.AUTO:
        raise ValueError(f'"{entry.name}": AUTO is not a dtype of files')
    if any(size < 0 for size in entry.shape):
        raise ValueError(f'"{entry.name}": the shape must be nonnegative, not {entry.shape}')
    if entry.dtype is DType.F4 and (not entry.shape or entry.shape[-1] % 2):
        raise ValueError(f'"{entry.name}": the last dimension of an F4 tensor must be even, not {entry.shape}')
    # Raises for a dtype that PyTorch lacks.
    as_torch_dtype(entry.dtype)
    expected = int(math.prod(entry.shape) * DTYPE_SIZES[entry.dtype])
    if expected != entry.nbytes:
        raise ValueError(f'"{entry.name}": {entry.dtype.value} {entry.shape} has {expected} bytes, not {entry.nbytes}')


def _tensor_of(entry: WriteEntry, framework: str) -> Tensor:
    """Returns the source of an entry, whose bytes count. The entry's dtype and shape may be others."""
    source = _wrap(entry.source, framework).detach()
    if (source.dtype, source.get_shape()) == (entry.dtype, entry.shape):
        return source.get_raw()
    return _interpret(source.contiguous().reshape([-1]).view(DType.U8).get_raw(), entry)


def _fill(plans: Sequence[ShardPlan], fill: FillFn) -> dict[str, Tensor]:
    """Returns the tensors that a fill function writes."""
    entries = sorted((entry for plan in plans for entry in plan.entries), key=lambda entry: -entry.nbytes)
    buffers = {entry.name: bytearray(entry.nbytes) for entry in entries}
    fill([(memoryview(buffers[entry.name]), entry) for entry in entries])
    # PyTorch refuses empty memory.
    no_bytes = torch.empty(0, dtype=torch.uint8)
    return {
        entry.name: _interpret(torch.frombuffer(buffer, dtype=torch.uint8) if buffer else no_bytes, entry)
        for entry, buffer in zip(entries, buffers.values(), strict=True)
    }


def _interpret(data: Tensor, entry: WriteEntry) -> Tensor:
    """Views bytes as the tensor of an entry."""
    if data.nbytes != entry.nbytes:
        raise ValueError(f'"{entry.name}": the source has {data.nbytes} bytes, and the entry {entry.nbytes}')
    shape = get_framework_op("pytorch").get_native_shape(entry.dtype, entry.shape)
    return TensorBase(data).view(entry.dtype).reshape(shape).get_raw()
