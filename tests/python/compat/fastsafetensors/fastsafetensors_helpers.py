"""Tensors and loads for the tests of `fst.compat.fastsafetensors`."""

import torch
import torch.distributed as dist

from fst.compat import fastsafetensors as compat


def rows(columns=8):
    """Returns the tensor in the files of the examples. Each row holds its index."""
    return torch.arange(16, dtype=torch.float16)[:, None].expand(16, columns).contiguous()


def load(files=("a.safetensors", "b.safetensors"), group=None, package=compat, **options):
    """Loads the files of one rank or of each rank, with a library."""
    loader = package.SafeTensorsFileLoader(group, "cpu", nogds=True)
    loader.add_filenames(files if isinstance(files, dict) else {0: list(files)})
    return loader.copy_files_to_device(**options)


def load_on_ranks(files, group=None, **options):
    return load(files, dist.group.WORLD if group is None else group, **options)
