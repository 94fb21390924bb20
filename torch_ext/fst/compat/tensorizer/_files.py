"""Where bytes are, whatever a caller named it by: a path, a descriptor, an open file or something like one."""

import io
import os
import shutil
import tempfile
from typing import IO, Any, BinaryIO

# What may be named.
FileLike = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | BinaryIO | io.IOBase | IO[bytes]

_MAGIC = b"|TZR|"
_REMOTE = ("s3", "http", "https", "redis")


def local_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """A path as text. Raises NotImplementedError for an address of something remote."""
    text = os.fsdecode(path)
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() in _REMOTE and not isinstance(path, os.PathLike):
        raise NotImplementedError(
            f"{text}: fst does not read or write {scheme.lower()}:// yet; copy the file with the tools of its store "
            "and give the path of the local copy"
        )
    return text


def is_path(file: FileLike) -> bool:
    """Whether something is named by its path."""
    return isinstance(file, str | bytes | os.PathLike)


def opened(file: Any, mode: str) -> IO[bytes]:
    """A descriptor as a file, which is then its owner; a file as it is. Raises TypeError for anything else."""
    if isinstance(file, int):
        return open(file, mode)
    if not callable(getattr(file, "read" if mode == "rb" else "write", None)):
        raise TypeError(f"a file must be a path, a descriptor or a binary file, not {type(file).__name__}")
    if isinstance(file, io.TextIOBase):
        raise ValueError('the file was opened as text; open it in a binary mode, such as "rb" or "wb"')
    found: IO[bytes] = file
    return found


def readable(file: IO[bytes]) -> tuple[str, IO[bytes]]:
    """The path of a file that holds what is left to read, and the file that must stay open for that path to lead there.

    That is the file itself, where it is on a disk and stands at its beginning, and a copy otherwise.
    """
    # The descriptor of other files, such as those that decompress, leads to other bytes than they give.
    if isinstance(getattr(file, "raw", file), io.FileIO) and file.seekable() and file.tell() == 0:
        return _descriptor_path(file), file
    copy = tempfile.TemporaryFile()  # noqa: SIM115  (who asked for it closes it)
    shutil.copyfileobj(file, copy)
    copy.flush()
    return _descriptor_path(copy), copy


def _descriptor_path(file: IO[bytes]) -> str:
    return f"/proc/self/fd/{file.fileno()}"


def refuse_foreign(path: str) -> None:
    """Raises NotImplementedError for a file in tensorizer's own format."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            raise NotImplementedError(
                f"{path}: this file is in tensorizer's own format ({_MAGIC.decode()}), which fst does not read yet; "
                "read it with tensorizer itself and write it anew with fst.compat.tensorizer.TensorSerializer or "
                "safetensors"
            )
