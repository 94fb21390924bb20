"""A checkpoint in several files, with an index that says which tensor is in which.

Whoever reads it begins with the index, so replacing the index is what replaces the checkpoint, at one moment. Files
that an index in force names are never written to: the shards of a save get names of its own, an index with these names
takes over, and only then do the shards get the names that are customary, again with an index that takes over at one
moment. So a process that ends anywhere in between leaves the old checkpoint or the new one, and never a mixture.
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
    """Saves a checkpoint as `path`, or in shards beside it where one file would be too large.

    `write` saves some of the tensors in one file.
    """
    if not path.name.endswith(_SUFFIX):
        raise ValueError(f"{path}: readers know shards by the ending {_SUFFIX} of their names; expected it here too")
    index = path.with_name(f"{path.name}.index.json")
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write(tensors, path)
        if index.exists():
            # While the old shards go, the index leads to the new file.
            _replace(_draft(index, tensors, shards, [path]), index)
        _remove_others(path, [path])
        index.unlink(missing_ok=True)
        _flush(path.parent)
        return

    files = [_shard(path, number, len(shards)) for number in range(1, len(shards) + 1)]
    token = os.urandom(4).hex()
    staged = [file.with_name(f"{file.name}.{token}") for file in files]
    try:
        for names, file in zip(shards, staged, strict=True):
            write({name: tensors[name] for name in names}, file)
        draft = _draft(index, tensors, shards, staged)
    except BaseException:
        for file in staged:
            file.unlink(missing_ok=True)
        raise
    _replace(draft, index)

    for old, new in zip(staged, files, strict=True):
        _name_also(old, new)
    _flush(path.parent)
    _replace(_draft(index, tensors, shards, files), index)
    _remove_others(path, files)
    _flush(path.parent)


def _split(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    """Names in their order, in shards of at most that many bytes of data; a larger tensor has one to itself."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor.nbytes
    return shards


def _shard(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}-{number:05}-of-{count:05}{_SUFFIX}")


def _draft(index: Path, tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]], files: Sequence[Path]) -> Path:
    """Writes an index under a name of its own, and has it on the disk."""
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file.name for names, file in zip(shards, files, strict=True) for name in names},
    }
    draft = index.with_name(f"{index.name}.{os.urandom(4).hex()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _replace(draft: Path, index: Path) -> None:
    os.replace(draft, index)
    _flush(index.parent)


def _name_also(old: Path, new: Path) -> None:
    """Gives a file a second name, which no index in force names."""
    new.unlink(missing_ok=True)
    try:
        os.link(old, new)
    except OSError:
        # On file systems without hard links the index leads nowhere until the next one is there.
        os.replace(old, new)


def _remove_others(path: Path, files: Sequence[Path]) -> None:
    """Removes what earlier saves to `path` have left, whether they ended well or not."""
    stem = re.escape(path.name.removesuffix(_SUFFIX))
    shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}\.safetensors(\.[0-9a-f]{{8}})?")
    draft = re.compile(rf"{stem}\.safetensors\.index\.json\.[0-9a-f]{{8}}")
    kept = {file.name for file in files}
    with contextlib.closing(os.scandir(path.parent)) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if name not in kept and (name == path.name or shard.fullmatch(name) or draft.fullmatch(name)):
            path.with_name(name).unlink(missing_ok=True)


def _flush(directory: Path) -> None:
    """Has the names in a directory on the disk, where the file system can do that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
