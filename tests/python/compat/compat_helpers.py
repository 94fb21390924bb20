"""Files of ranks for the tests of the packages of `fst.compat`."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import fst
from rawfile import random_raw, write

SHAPES = {"matrix": (6, 4), "uneven": (5, 6), "few rows": (1, 2), "cube": (2, 3, 4), "no rows": (0, 2)}


def own_files(directory, size):
    """Returns a file per rank."""
    return {rank: [f"{directory}/{rank}.safetensors"] for rank in range(size)}


def all_files(directory, size):
    return [file for [file] in own_files(directory, size).values()]


def write_files(directory, size, dtypes=("F32",), shapes=SHAPES):
    """Writes a file per rank. The names of the tensors contain dtype, shape and rank."""
    for rank, file in enumerate(all_files(directory, size)):
        names = [f"{dtype}/{shape}/{rank}" for dtype in dtypes for shape in shapes]
        write(Path(file), {name: raw(name) for name in names})
    return str(directory)


def raw(name):
    dtype, shape, rank = name.split("/")
    return random_raw(dtype, SHAPES[shape], int(rank))


@contextlib.contextmanager
def count_reads():
    """Counts bytes read. Files are read instead of mapped."""
    with mock.patch.dict(os.environ, FST_READER="pread"), fst.profile() as profile:
        yield lambda: profile.summary().read_bytes
