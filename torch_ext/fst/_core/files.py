"""Names of files, and regular files, as the core knows and opens them, for code that lists or reads files itself."""

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def is_index(name: str) -> bool:
    """Returns whether a name belongs to an index: `model.safetensors.index.json`, or one with a variant, such as
    `model.safetensors.index.fp16.json`.
    """
    # The command line looks at files before it loads the libraries.
    from fst._core.ops import call

    return bool(call("is_index", name))


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the sorted names in a directory, without hidden files."""
    return sorted(entry.name for entry in Path(directory).iterdir() if not entry.name.startswith("."))


def safetensors_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the sorted names of safetensors files in a directory, without hidden files."""
    return [name for name in names_in(directory) if name.endswith(".safetensors")]


def open_regular(path: str | os.PathLike[str], mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
    """Opens a regular file in a binary mode. Neither a FIFO nor a device blocks the call."""
    return open(path, mode, buffering, opener=_open_descriptor)  # pyrefly: ignore[bad-return]


def _open_descriptor(path: str, flags: int) -> int:
    # Opening a device may have effects. This check avoids them, and the second one cannot be outrun by a rename.
    if os.path.exists(path):
        _check_regular(path, os.stat(path))
    # 0o666 is the mode of files that `open` creates.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(path, os.fstat(descriptor))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    message = f"is a {_KINDS.get(stat.S_IFMT(found.st_mode), 'special file')}; expected a regular file"
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, f"{path}: {message}")
    raise ValueError(f"{path}: {message}")
