"""Temporary files of saves to a local directory, and those that a killed process has left there.

A save of `model.safetensors` in shards has a token of eight hexadecimal digits, and these temporary files:

- `.model.safetensors.TOKEN.fst-tmp`, an empty file on which the saving process holds a lock (flock). The process
  creates it first and removes it last.
- `model-00001-of-00002.safetensors.TOKEN`, a shard.
- `model.state-TOKEN`, values that are no tensors, which the index names once the save is complete.

The core writes a file as `.NAME.PROCESS-NUMBER.fst-tmp`, with a lock on it, where it cannot be without a name.

The kernel releases a lock when the process ends, on NFS also for other machines. A file that can be locked has been
left over.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fst._core.files import open_regular

SUFFIX = ".safetensors"

_LOCK = re.compile(r"\.(?P<name>.+\.safetensors)\.(?P<token>[0-9a-f]{8})\.fst-tmp", re.DOTALL)
_CORE_FILE = re.compile(r"\.(?P<name>.+)\.\d+-\d+\.fst-tmp", re.DOTALL)
# Time in which the core locks a file that it has created, or renames a link, in seconds.
_CORE_FILE_SECONDS = 60


class Leftover(NamedTuple):
    """Temporary file that was removed. `bytes` is its size."""

    path: Path
    bytes: int


class SaveLock:
    """Lock of a running save on its temporary files.

    Attributes:
        token: Random part of their names.
    """

    def __init__(self, path: Path) -> None:
        """Creates the lock for a save of the checkpoint `path`."""
        while True:
            self.token = os.urandom(4).hex()
            self._path = path.with_name(f".{path.name}.{self.token}.fst-tmp")
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Without support for locks, other processes cannot lock the file either.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # A process that removes leftovers may have come in between.
            if os.fstat(self._descriptor).st_nlink:
                return
            os.close(self._descriptor)

    def release(self, leaves_files: bool = False) -> None:
        """Ends the lock. Later calls do nothing.

        Args:
            leaves_files: Whether temporary files of the save remain, for `remove_leftovers`.
        """
        if self._descriptor >= 0:
            if not leaves_files:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            # Explicitly, because forked children have the descriptor, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def shard_path(path: Path, number: int, count: int) -> Path:
    """Returns the path of one of `count` shards of the checkpoint `path`. The first number is 1."""
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}-{number:05}-of-{count:05}{SUFFIX}")


def staged_paths(path: Path, count: int, token: str) -> list[Path]:
    """Returns the paths under which a save writes its shards."""
    shards = [shard_path(path, number, count) for number in range(1, count + 1)]
    return [shard.with_name(f"{shard.name}.{token}") for shard in shards]


def state_path(path: Path, token: str) -> Path:
    """Returns the path of the file with the values of the checkpoint `path` that are no tensors."""
    return path.with_name(state_name(path.name, token))


def state_name(name: str, token: str) -> str:
    """Returns the name of the file with the values of the checkpoint `name` that are no tensors."""
    return f"{name.removesuffix(SUFFIX)}.state-{token}"


# Key of the metadata in an index under which it names the file of `state_path`.
STATE_KEY = "fst.state"


def saved_files(path: Path) -> list[Path]:
    """Returns the files of the checkpoint `path`, except for its index, and shards of older ones."""
    stem = re.escape(path.name.removesuffix(SUFFIX))
    # An interrupted save may have left an index that names temporary files, which are the checkpoint then.
    shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}\.safetensors")
    temporary = re.compile(rf"({shard.pattern}\.|{stem}\.state-)[0-9a-f]{{8}}")
    named = _named_files(path)
    return [
        path.with_name(name)
        for name in _names(path.parent)
        if name == path.name or shard.fullmatch(name) or (name in named and temporary.fullmatch(name))
    ]


def remove_leftovers(directory: Path, name: str | None = None) -> list[Leftover]:
    """Removes temporary files that no running save uses: of the checkpoint `name`, or of all in the directory.

    The files of running saves and those that an index names stay. Where the file system has no locks, all files stay.
    """
    removed: list[Leftover] = []
    names = _names(directory)
    for lock_name in names:
        lock = _LOCK.fullmatch(lock_name)
        if lock and name in (None, lock["name"]):
            with _try_lock(directory / lock_name) as is_locked:
                if is_locked:
                    path = directory / lock["name"]
                    kept = _named_files(path)
                    for other in _names(directory):
                        if other not in kept and _is_of_save(other, path, lock["token"]):
                            removed += _remove(directory / other)
                    removed += _remove(directory / lock_name)
    for file_name in names:
        core_file = _CORE_FILE.fullmatch(file_name)
        if core_file and (name is None or core_file["name"].startswith(name.removesuffix(SUFFIX))):
            with _try_lock(directory / file_name) as is_locked:
                if is_locked and _seconds_since_change(directory / file_name) > _CORE_FILE_SECONDS:
                    removed += _remove(directory / file_name)
    return removed


def _is_of_save(name: str, path: Path, token: str) -> bool:
    stem = re.escape(path.name.removesuffix(SUFFIX))
    return re.fullmatch(rf"{stem}(-\d{{5,}}-of-\d{{5,}}\.safetensors\.|\.state-){token}", name) is not None


def _named_files(path: Path) -> set[str]:
    """Returns the names of files in the index of the checkpoint `path`."""
    try:
        with open_regular(path.with_name(f"{path.name}.index.json")) as file:
            index = json.load(file)
        return {*index["weight_map"].values(), index.get("metadata", {}).get(STATE_KEY)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _names(directory: Path) -> list[str]:
    with contextlib.closing(os.scandir(directory)) as entries:
        return sorted(entry.name for entry in entries)


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Locks a file during the block, if it exists and no process has a lock on it. Returns whether that succeeded."""
    try:
        # Locks over NFS need a file that is open for writing.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _seconds_since_change(path: Path) -> float:
    try:
        return time.time() - path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def _remove(path: Path) -> list[Leftover]:
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return []
    return [Leftover(path, size)]
