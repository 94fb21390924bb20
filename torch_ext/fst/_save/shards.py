"""Saves a checkpoint in several files, with an index that maps tensors to files.

Readers start with the index, so replacing the index replaces the checkpoint atomically. A save never writes to files
that the current index names:

1. Write the shards under temporary names, and replace the index by one with these names.
2. Link the shards to their final names, and replace the index again.

A process that ends at any point leaves either the old checkpoint or the new one, never a mixture.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

_SUFFIX = ".safetensors"
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def save_shards(
    tensors: Mapping[str, Tensor],
    path: Path,
    max_shard_bytes: int,
    write: Callable[[Mapping[str, Tensor], Path], None],
) -> None:
    """Saves a checkpoint as `path`, or in shards beside it if one file would exceed `max_shard_bytes`.

    `write` saves a part of the tensors in one file.
    """
    if not path.name.endswith(_SUFFIX):
        raise ValueError(f"{path}: the names of shards must end in {_SUFFIX}; give a path that ends in it")
    index = path.with_name(f"{path.name}.index.json")
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write(tensors, path)
        if index.exists():
            # The index names the new file while the old shards are removed.
            _replace(_write_temporary_index(index, tensors, shards, [path]), index)
        _remove_others(path, [path])
        index.unlink(missing_ok=True)
        _flush_directory(path.parent)
        return

    files = [_shard_path(path, number, len(shards)) for number in range(1, len(shards) + 1)]
    token = os.urandom(4).hex()
    staged = [file.with_name(f"{file.name}.{token}") for file in files]
    try:
        for names, file in zip(shards, staged, strict=True):
            write({name: tensors[name] for name in names}, file)
        temporary = _write_temporary_index(index, tensors, shards, staged)
    except BaseException:
        for file in staged:
            file.unlink(missing_ok=True)
        raise
    _replace(temporary, index)

    for old, new in zip(staged, files, strict=True):
        _link(old, new)
    _flush_directory(path.parent)
    _replace(_write_temporary_index(index, tensors, shards, files), index)
    _remove_others(path, files)
    _flush_directory(path.parent)


def _split(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    """Splits names, in their order, into shards of at most `max_shard_bytes`. A larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor.nbytes
    return shards


def _shard_path(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}-{number:05}-of-{count:05}{_SUFFIX}")


def _write_temporary_index(
    index: Path, tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]], files: Sequence[Path]
) -> Path:
    """Writes an index under a temporary name and flushes it to the disk."""
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file.name for names, file in zip(shards, files, strict=True) for name in names},
    }
    temporary = index.with_name(f"{index.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _replace(temporary: Path, index: Path) -> None:
    os.replace(temporary, index)
    _flush_directory(index.parent)


def _link(old: Path, new: Path) -> None:
    """Gives a file a second name that the current index does not contain."""
    new.unlink(missing_ok=True)
    try:
        os.link(old, new)
    except OSError:
        # Without hard links, the index names a missing file until it is replaced.
        os.replace(old, new)


def _remove_others(path: Path, files: Sequence[Path]) -> None:
    """Removes the files of earlier saves to `path`, complete or not."""
    stem = re.escape(path.name.removesuffix(_SUFFIX))
    shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}\.safetensors(\.[0-9a-f]{{8}})?")
    temporary_index = re.compile(rf"{stem}\.safetensors\.index\.json\.[0-9a-f]{{8}}")
    kept = {file.name for file in files}
    with contextlib.closing(os.scandir(path.parent)) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if name not in kept and (name == path.name or shard.fullmatch(name) or temporary_index.fullmatch(name)):
            path.with_name(name).unlink(missing_ok=True)


def _flush_directory(directory: Path) -> None:
    """Flushes the entries of a directory to the disk, if the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
