"""Functions of InstantTensor, and the names that programs import from its module `_impl`."""

import os
from pathlib import Path as LocalPath

import torch

from fst._core.arguments import Path, path_of
from fst._core.urls import is_remote, local_path_of
from fst.compat._header import read_header as read_safetensors_metadata
from fst.compat.instanttensor._safe_open import safe_open

__all__ = ["file_in_memory", "init", "read_safetensors_metadata", "safe_open"]


def init() -> None:
    """Initializes CUDA if it is available. Otherwise the first load does so."""
    if torch.cuda.is_available():
        torch.cuda.init()


def file_in_memory(filename: Path) -> bool:
    """Returns whether a file is on tmpfs or ramfs. Raises OSError if a local file cannot be accessed."""
    path = path_of(filename)
    if is_remote(path):
        return False
    device = os.stat(local_path_of(path)).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in LocalPath("/proc/self/mountinfo").read_text().splitlines()]
    # The type of the file system follows the separator.
    return any(fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in mounts)
