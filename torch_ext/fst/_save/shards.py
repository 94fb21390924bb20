"""Saves a checkpoint in several files, with an index that maps tensors to files.

Readers start with the index, so replacing the index replaces the checkpoint atomically. A save never writes to files
that the current index names:

1. Write the shards under temporary names, and replace the index by one with these names.
2. Link the shards to their final names, and replace the index again.

A process that ends at any point leaves either the old checkpoint or the new one, never a mixture. The core creates and
replaces all files, so they follow the rules of a save in one file: symbolic links are followed, permissions are kept,
and only regular files that the process may write are replaced.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fst._core import ops
from fst._core.batches import split_by_size
from fst._core.interrupts import defer_interrupts

_SUFFIX = ".safetensors"
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def save_shards(
    tensors: Mapping[str, Tensor],
    path: Path,
    max_shard_bytes: int,
    write: Callable[[Mapping[str, Tensor], str, str, int, int], None],
    index_metadata: Mapping[str, str] | None = None,
) -> None:
    """Saves a checkpoint as `path`, or in shards beside it if one file would exceed `max_shard_bytes`.

    With `index_metadata`, which the index gets beside its own, there always is an index. The tensors may be on meta.

    `write` saves a part of the tensors in one file. If the file is new, it gets the permissions of another file, whose
    path is passed unless it is empty. The last arguments are the number of the file, from 1, and the number of files.
    """
    if not path.name.endswith(_SUFFIX):
        raise ValueError(f"{path}: the names of shards must end in {_SUFFIX}; give a path that ends in it")
    index = path.with_name(f"{path.name}.index.json")
    shards = split(tensors, max_shard_bytes)
    count = len(shards)
    is_single = count == 1 and index_metadata is None
    files = [path] if is_single else [_shard_path(path, number, count) for number in range(1, count + 1)]
    old = list(_saved_files(path))
    for file in {*old, *files, index}:
        ops.check_target(str(file))

    def model(file: Path) -> str:
        """Returns the file that a new file replaces, or else one of the old checkpoint, for its permissions."""
        return str(next((existing for existing in (file, *old, index) if existing.exists()), ""))

    def write_index(content: bytes) -> None:
        ops.write_bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8), str(index), model(index))

    if is_single:
        write(tensors, str(path), model(path), 1, 1)
        with defer_interrupts():
            if index.exists():
                # The index names the new file while the old shards are removed.
                write_index(index_content(shards, [file.name for file in files]))
            _remove(old, files)
            index.unlink(missing_ok=True)
            _flush_directory(path.parent)
        return

    for file in files:
        _check_link(file)
    token = os.urandom(4).hex()
    staged = [file.with_name(f"{file.name}.{token}") for file in files]
    content = index_content(shards, [file.name for file in staged], index_metadata)
    with defer_interrupts() as interrupts:
        try:
            for number, (shard, file, final) in enumerate(zip(shards, staged, files, strict=True), 1):
                write(shard, str(file), model(final), number, count)
                interrupts.deliver()
            write_index(content)
        except BaseException:
            # The index may be replaced although the call failed, if the directory could not be flushed.
            if not _has_content(index, content):
                _remove(staged, [])
            raise
        for source, final in zip(staged, files, strict=True):
            ops.link_file(str(source), str(final))
        write_index(index_content(shards, [file.name for file in files], index_metadata))
        _remove([*old, *staged], files)
        _flush_directory(path.parent)


def split(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """Splits tensors, in their order, into shards of at most `max_shard_bytes`. A larger tensor gets its own shard."""
    return list(split_by_size(tensors.items(), max_shard_bytes)) or [{}]


def _shard_path(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}-{number:05}-of-{count:05}{_SUFFIX}")


def index_content(
    shards: Sequence[Mapping[str, Tensor]], files: Sequence[str], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns an index that maps each tensor to the name of its file."""
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    content = {
        "metadata": {"total_size": size, **(metadata or {})},
        "weight_map": {name: file for shard, file in zip(shards, files, strict=True) for name in shard},
    }
    return json.dumps(content, indent=2).encode()


def _has_content(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except OSError:
        return False


def _check_link(file: Path) -> None:
    """Checks that a shard, if it is a symbolic link, can be linked to the target's directory once it is complete."""
    if file.is_symlink() and os.stat(os.path.dirname(os.path.realpath(file))).st_dev != os.stat(file.parent).st_dev:
        raise ValueError(
            f"{file}: is a symbolic link to another file system; a shard cannot replace it. Remove the link"
        )


def _saved_files(path: Path) -> Iterator[Path]:
    """Yields the files of earlier saves to `path`, complete or not, except for the index."""
    stem = re.escape(path.name.removesuffix(_SUFFIX))
    shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}\.safetensors(\.[0-9a-f]{{8}})?")
    with contextlib.closing(os.scandir(path.parent)) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if name == path.name or shard.fullmatch(name):
            yield path.with_name(name)


def _remove(files: Sequence[Path], kept: Sequence[Path]) -> None:
    for file in files:
        if file not in kept:
            file.unlink(missing_ok=True)


def _flush_directory(directory: Path) -> None:
    """Flushes the entries of a directory, in which the checkpoint is in place, if the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            text = (
                "the new checkpoint is complete and in place, but a power failure may still undo its renames, because "
                f"the directory cannot be flushed: {error.strerror}"
            )
            raise OSError(error.errno, text, str(directory)) from error
    finally:
        os.close(descriptor)
