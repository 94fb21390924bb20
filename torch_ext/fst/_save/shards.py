"""Saves a checkpoint in several files, with an index that maps tensors to files.

Readers start with the index, so replacing the index replaces the checkpoint atomically. A save never writes to files
that the current index names:

1. Write the shards under temporary names, and replace the index by one with these names.
2. Link the shards to their final names, and replace the index again.

A process that ends at any point leaves either the old checkpoint or the new one, never a mixture. The core creates and
replaces all files, so they follow the rules of a save in one file: symbolic links are followed, permissions are kept,
and only regular files that the process may write are replaced.
"""

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fst._core import ops
from fst._core.batches import HasBytes, split_by_size
from fst._core.interrupts import defer_interrupts
from fst._save.leftovers import (
    STATE_KEY,
    SUFFIX,
    SaveLock,
    remove_leftovers,
    saved_files,
    shard_path,
    staged_paths,
    state_path,
)

_Tensor = TypeVar("_Tensor", bound=HasBytes)

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class CheckpointFiles:
    """Files of a local checkpoint that a save replaces.

    `begin` comes first. Then the save writes each file at its path in `staged`. `commit` makes them the checkpoint, and
    `abandon` removes them. Only one process calls these methods, also if several write to the files.

    Attributes:
        staged: Path at which each file is written.
    """

    def __init__(self, path: Path, count: int, has_index: bool, is_shared: bool = False) -> None:
        """Names the files, and checks that all of them can be created or replaced.

        Args:
            path: Path of the checkpoint. Shards and the index are beside it.
            count: Number of files.
            has_index: Whether there is an index. Several files always have one.
            is_shared: Whether several processes write to a file, which therefore does not appear whole.
        """
        if not path.name.endswith(SUFFIX):
            raise ValueError(f"{path}: the names of shards must end in {SUFFIX}; give a path that ends in it")
        self._path = path
        self._index = path.with_name(f"{path.name}.index.json")
        self._has_index = has_index or count > 1
        numbers = range(1, count + 1)
        self._files = [shard_path(path, number, count) for number in numbers] if self._has_index else [path]
        self._is_staged = self._has_index or is_shared
        self._is_committed = False
        self._lock: SaveLock | None = None
        self.staged = self._files
        self._old = saved_files(path)
        for file in {*self._old, *self._files, self._index}:
            ops.check_target(str(file))
        if self._is_staged:
            for file in self._files:
                _check_link(file)

    @property
    def token(self) -> str:
        """Random part of the names in `staged`."""
        assert self._lock is not None
        return self._lock.token

    def begin(self) -> None:
        """Removes temporary files of saves that were killed, and reserves names for those of this save."""
        remove_leftovers(self._path.parent, self._path.name)
        if self._is_staged:
            self._lock = SaveLock(self._path)
            self.staged = staged_paths(self._path, len(self._files), self.token)

    def create(self, lengths: Sequence[int]) -> list[str]:
        """Creates the files in `staged`, of these lengths in bytes, for several processes. Returns empty ids."""
        files = enumerate(zip(self.staged, lengths, strict=True), 1)
        return [ops.create_save_file(str(path), length, self.model(number)) for number, (path, length) in files]

    def model(self, number: int) -> str:
        """Returns the path of a file from which file `number`, from 1, gets its permissions. It may be empty."""
        return self._model(self._files[number - 1])

    def write_state(self, values: Mapping[str, bytes]) -> dict[str, str]:
        """Writes values that are no tensors in a file beside. Returns the metadata with which the index names it."""
        path = state_path(self._path, self.token)
        write_state(values, str(path), self.model(1))
        return {STATE_KEY: path.name}

    def commit(self, shards: Sequence[Mapping[str, HasBytes]], index_metadata: Mapping[str, str] | None) -> None:
        """Replaces the checkpoint by the complete files in `staged`, and removes the files of the old checkpoint.

        Args:
            shards: The tensors in each file.
            index_metadata: Metadata of the index.
        """
        finals = index_content(shards, [file.name for file in self._files], index_metadata)
        if self._has_index:
            content = index_content(shards, [file.name for file in self.staged], index_metadata)
            try:
                self._write_index(content)
            finally:
                # The index may be replaced although the call failed, if the directory could not be flushed.
                self._is_committed = _has_content(self._index, content)
        if self._is_staged:
            for source, final in zip(self.staged, self._files, strict=True):
                ops.link_file(str(source), str(final))
        if self._has_index or self._index.exists():
            # The index names the new files while the old ones are removed.
            self._write_index(finals)
        new = {*self._files, self._path.parent / (index_metadata or {}).get(STATE_KEY, "")}
        for file in {*self._old, *self.staged} - new:
            file.unlink(missing_ok=True)
        if not self._has_index:
            self._index.unlink(missing_ok=True)
        _flush_directory(self._path.parent)
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """Ends a save that has failed. Removes its files, unless they are the checkpoint already."""
        if self._lock is not None:
            leaves_files = self._is_committed
            if not leaves_files:
                for file in (*self.staged, state_path(self._path, self.token)):
                    try:
                        file.unlink(missing_ok=True)
                    except OSError:
                        # The error of the save is the one to raise. The next save tries again.
                        leaves_files = True
            self._lock.release(leaves_files)

    def _model(self, file: Path) -> str:
        """Returns the file that a new file replaces, or else one of the old checkpoint, for its permissions."""
        return str(next((existing for existing in (file, *self._old, self._index) if existing.exists()), ""))

    def _write_index(self, content: bytes) -> None:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        ops.write_bytes(data, str(self._index), self._model(self._index))


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
    shards = split(tensors, max_shard_bytes)
    files = CheckpointFiles(path, len(shards), index_metadata is not None)
    with defer_interrupts() as interrupts:
        try:
            files.begin()
            for number, (shard, file) in enumerate(zip(shards, files.staged, strict=True), 1):
                write(shard, str(file), files.model(number), number, len(shards))
                interrupts.deliver()
            files.commit(shards, index_metadata)
        except BaseException:
            files.abandon()
            raise


def split(tensors: Mapping[str, _Tensor], max_shard_bytes: int) -> list[dict[str, _Tensor]]:
    """Splits tensors, in their order, into shards of at most `max_shard_bytes`. A larger tensor gets its own shard."""
    return list(split_by_size(tensors.items(), max_shard_bytes)) or [{}]


def index_content(
    shards: Sequence[Mapping[str, HasBytes]], files: Sequence[str], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns an index that maps each tensor to the name of its file."""
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    content = {
        "metadata": {"total_size": size, **(metadata or {})},
        "weight_map": {name: file for shard, file in zip(shards, files, strict=True) for name in shard},
    }
    return json.dumps(content, indent=2).encode()


def write_state(values: Mapping[str, bytes], path: str, model: str) -> None:
    """Writes values that are no tensors in a file, which gets the permissions of the file `model`, unless empty."""
    tensors = [torch.frombuffer(bytearray(value), dtype=torch.uint8) for value in values.values()]
    ops.save_shard(tensors, list(values), path, None, model)


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
