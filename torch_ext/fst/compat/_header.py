"""What the header of one file says, checked as every load checks it."""

import errno
import os
from typing import NamedTuple

from fst._core.arguments import Path, path_of
from fst._core.classes import Checkpoint


class Entry(NamedTuple):
    """A tensor. Its bytes are counted from the first one of all tensors."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


class Header(NamedTuple):
    """A file; `header_bytes` stand before the first byte of its tensors."""

    metadata: dict[str, str] | None
    entries: dict[str, Entry]
    header_bytes: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """The header of a file, its tensors in the order of their bytes.

    Raises the errors of `fst.load_file` that concern paths and headers, and IsADirectoryError for a directory or an
    index file, which stand for several files.
    """
    text = path_of(path)
    if os.path.isdir(text) or text.endswith(".index.json"):
        raise IsADirectoryError(errno.EISDIR, "this stands for several files, which have to be named one by one", text)
    checkpoint = Checkpoint([text])
    entries: dict[str, Entry] = {}
    end = 0
    # Tensors lie one behind the other to the end of the file; a file where they do not cannot be opened.
    for name in checkpoint.names():
        dtype, shape, nbytes = checkpoint.tensor_info(name)
        begin, end = end, end + nbytes
        entries[name] = Entry(dtype, list(shape), begin, end)
    file_bytes = os.stat(text).st_size
    texts = [metadata for _, metadata in checkpoint.metadata()]
    return Header(dict(texts[0]) if texts else None, entries, file_bytes - end, file_bytes)
