"""Files and loads of several ranks, for the tests of `fst.compat.fastsafetensors`."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import fst
from fst.compat import fastsafetensors as compat
from rawfile import random_raw, write

SHAPES = {"matrix": (6, 4), "uneven": (5, 6), "few rows": (1, 2), "cube": (2, 3, 4), "no rows": (0, 2)}


def own_files(directory, size):
    """Returns a file per rank."""
    return {rank: [f"{directory}/{rank}.safetensors"] for rank in range(size)}


def write_files(directory, size, dtypes=("F32",), shapes=SHAPES):
    """Writes a file per rank. The names of the tensors contain dtype, shape and rank."""
    for rank, [file] in own_files(directory, size).items():
        tensors = {f"{dtype}/{shape}/{rank}": raw(f"{dtype}/{shape}/{rank}") for dtype in dtypes for shape in shapes}
        write(Path(file), tensors)
    return str(directory)


def raw(name):
    dtype, shape, rank = name.split("/")
    return random_raw(dtype, SHAPES[shape], int(rank))


def load(files, group=None, loader_class=compat.SafeTensorsFileLoader, **options):
    loader = loader_class(dist.group.WORLD if group is None else group, "cpu")
    loader.add_filenames(files)
    return loader.copy_files_to_device(**options)


def shard(tensor, dim, group=None):
    chunks = tensor.chunk(dist.get_world_size(group), dim)
    rank = dist.get_rank(group)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


@contextlib.contextmanager
def count_reads():
    """Counts bytes read. Files are read instead of mapped."""
    with mock.patch.dict(os.environ, FST_READER="pread"), fst.profile() as profile:
        yield lambda: profile.summary().read_bytes


def all_files(directory, size):
    return [file for [file] in own_files(directory, size).values()]
