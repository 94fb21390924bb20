"""Headers of single files."""

import errno
import os
from collections.abc import Sequence
from typing import Any

from fst._core.arguments import Path, path_of
from fst._core.checkpoint import Checkpoint
from fst._core.files import is_index
from fst._core.source import Source
from fst._core.urls import local_path_of


def read_header(path: Path) -> tuple[dict[str, str] | None, dict[str, dict[str, Any]], int]:
    """Reads and checks the header of a file.

    Returns:
        The metadata, or None if the file has none; the "dtype", "shape" and "data_offsets" of each tensor by name, in
        the order of their bytes; and the number of bytes before the data of the first tensor.

    Raises:
        IsADirectoryError: The path is a directory or an index file, which stand for several files.
        Errors of `fst.load_file` for paths and headers.
    """
    text = path_of(path)
    if os.path.isdir(local_path_of(text)) or is_index(text):
        raise IsADirectoryError(errno.EISDIR, "expected one file; name the files one by one", text)
    checkpoint = Checkpoint([text])
    tensors = {name: checkpoint.tensor_info(name) for name in checkpoint.names()}
    metadata = next((metadata for _, metadata in checkpoint.metadata()), None)
    begins = [tensor.begin for tensor in tensors.values()]
    header_bytes = begins[0] if begins else Source(text).length()
    entries = {
        name: header_entry(
            tensor.dtype, tensor.shape, [tensor.begin - header_bytes, tensor.begin - header_bytes + tensor.nbytes]
        )
        for name, tensor in tensors.items()
    }
    return metadata, entries, header_bytes


def header_entry(dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> dict[str, Any]:
    """Returns a header entry in the form of its JSON."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}
