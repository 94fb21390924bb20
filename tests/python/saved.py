"""Files that fst saves, and damage to them."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import fst

KEY = fst.EncryptionKey.from_bytes(bytes(range(32)))


@contextlib.contextmanager
def registered(key: fst.EncryptionKey = KEY) -> Iterator[None]:
    """Registers a key for loads and saves by operators."""
    key.register()
    try:
        yield
    finally:
        key.unregister()


def write_each(path: Path, tensors: Mapping[str, Tensor], *arguments: Any, **options: Any) -> None:
    """Writes tensors one by one with a `Writer`."""
    with fst.Writer(path, *arguments, **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def manifest_of(*paths: Path) -> dict[str, str]:
    """Returns the SHA-256 digests of files by their names."""
    return {path.name: "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the first byte of the data, and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def damage(path: Path, name: str, offset: int = -1) -> None:
    """Changes a bit of a tensor, in the byte at an offset from its begin or, if negative, from its end."""
    begin, header = read_header(path)
    first, end = header[name]["data_offsets"]
    flip_bit(path, begin + (end if offset < 0 else first) + offset)


def flip_bit(path: Path, position: int) -> None:
    """Changes a bit of the byte at a position of a file, which counts from the end if it is negative."""
    with path.open("r+b") as file:
        begin = file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        [byte] = file.read(1)
        file.seek(begin)
        file.write(bytes([byte ^ 1]))
