"""Files as callers pass them: paths, descriptors and binary file objects."""

import io
import os
import shutil
import tempfile
from typing import IO, Any, BinaryIO, TypeGuard

from fst._core.urls import is_remote

FileLike = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | BinaryIO | io.IOBase | IO[bytes]
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def scheme_of(path: _Path) -> str:
    """Returns the scheme of a remote URL in lower case, or an empty text for a local path.

    As in tensorizer, an `os.PathLike` is a local path.
    """
    text = os.fsdecode(path)
    return text.partition("://")[0].lower() if is_remote(text) and not isinstance(path, os.PathLike) else ""


def is_path(file: FileLike) -> TypeGuard[_Path]:
    """Returns whether a file is given by its path."""
    return isinstance(file, (str, bytes, os.PathLike))


def opened(file: Any, mode: str) -> IO[bytes]:
    """Opens a descriptor as a file object, which then owns it. Returns a file object unchanged.

    Raises:
        TypeError: `file` is neither a descriptor nor a file object.
        ValueError: The file was opened in text mode.
    """
    if isinstance(file, int):
        return open(file, mode)
    if not callable(getattr(file, "read" if mode == "rb" else "write", None)):
        raise TypeError(f"a file must be a path, a descriptor or a binary file, not {type(file).__name__}")
    if isinstance(file, io.TextIOBase):
        raise ValueError('the file was opened as text; open it in a binary mode, such as "rb" or "wb"')
    found: IO[bytes] = file
    return found


def readable(file: IO[bytes]) -> tuple[str, IO[bytes]]:
    """Returns a path with the unread bytes of a file, and the file that must stay open as long as the path is used.

    The file is used in place if it is a regular file at position 0. Otherwise its unread bytes are copied to a
    temporary file.
    """
    # Other file objects, such as decompressors, return other bytes than their descriptor.
    if isinstance(getattr(file, "raw", file), io.FileIO) and file.seekable() and file.tell() == 0:
        return _descriptor_path(file), file
    copy = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    shutil.copyfileobj(file, copy)
    copy.flush()
    return _descriptor_path(copy), copy


def _descriptor_path(file: IO[bytes]) -> str:
    return f"/proc/self/fd/{file.fileno()}"
