"""Headers of single files."""

import errno
import os
from itertools import accumulate, pairwise
from typing import NamedTuple

from fst._core.arguments import Path, path_of
from fst._core.classes import Checkpoint, TensorInfo


class Header(NamedTuple):
    """Header of a file.

    Attributes:
        metadata: The metadata, or None if the file has none.
        tensors: The header entries by name, in the order of the bytes.
        data_offsets: Begin and end of each tensor's bytes, counted from the first byte of all tensors.
        header_bytes: Number of bytes before the first byte of all tensors.
        file_bytes: Size of the file.
    """

    metadata: dict[str, str] | None
    tensors: dict[str, TensorInfo]
    data_offsets: dict[str, tuple[int, int]]
    header_bytes: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Reads and checks the header of a file.

    Raises:
        IsADirectoryError: The path is a directory or an index file, which stand for several files.
        And the errors of `fst.load_file` that concern paths and headers.
    """
    text = path_of(path)
    if os.path.isdir(text) or text.endswith(".index.json"):
        raise IsADirectoryError(errno.EISDIR, "this stands for several files, which have to be named one by one", text)
    checkpoint = Checkpoint([text])
    tensors = {name: checkpoint.tensor_info(name) for name in checkpoint.names()}
    # The tensors of a valid file are contiguous and end at the end of the file.
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    file_bytes = os.stat(text).st_size
    metadata = next((metadata for _, metadata in checkpoint.metadata()), None)
    return Header(metadata, tensors, dict(zip(tensors, pairwise(ends), strict=True)), file_bytes - ends[-1], file_bytes)
