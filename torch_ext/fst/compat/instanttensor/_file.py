"""What can be told of a file without its tensors."""

import os
from pathlib import Path as LocalPath
from typing import Any

from fst._core.arguments import Path, path_of
from fst.compat._header import read_header


def read_safetensors_metadata(filename: Path) -> tuple[dict[str, str] | None, dict[str, dict[str, Any]], int]:
    """The header of a file, read and checked.

    Returns:
        The free text that its writer left, or None; by name the "dtype", "shape" and "data_offsets" of each tensor, in
        the order of their bytes; and how many bytes stand before the first tensor.

    Raises:
        The errors of `fst.load_file` that concern paths and headers.
    """
    header = read_header(filename)
    tensors = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": list(header.data_offsets[name])}
        for name, tensor in header.tensors.items()
    }
    return header.metadata, tensors, header.header_bytes


def file_in_memory(filename: Path) -> bool:
    """Whether a file lies in memory: on tmpfs or ramfs. Raises FileNotFoundError and the like where there is none."""
    device = os.stat(path_of(filename)).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in LocalPath("/proc/self/mountinfo").read_text().splitlines()]
    # Behind the dash stands the kind of file system.
    return any(fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in mounts)
