"""Headers of single files."""

import errno
import os
from collections.abc import Mapping
from typing import Any

from fst._core.arguments import Path, path_of
from fst._core.classes import Checkpoint, Source, TensorInfo


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
    if os.path.isdir(text) or text.endswith(".index.json"):
        raise IsADirectoryError(errno.EISDIR, "expected one file; name the files one by one", text)
    checkpoint = Checkpoint([text])
    tensors = {name: checkpoint.tensor_info(name) for name in checkpoint.names()}
    metadata = next((metadata for _, metadata in checkpoint.metadata()), None)
    header_bytes = Source(text).length() - sum(tensor.nbytes for tensor in tensors.values())
    return metadata, header_entries(tensors), header_bytes


def header_entries(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Returns header entries in the form of their JSON, given all tensors of a file in the order of their bytes."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        # The tensors of a valid file are contiguous.
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return entries
