"""Ctrl-C on one rank between the collectives of a load: all ranks raise at once, and the group can load again."""

import re
import signal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate

import fst
import fst.dcp
from fst.compat import fastsafetensors, instanttensor
from rawfile import assert_all_same

SIZE = 3


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.randn(5, 4), "bias": torch.randn(5)}, path)
    return path


def file_loader(path):
    loader = fastsafetensors.SafeTensorsFileLoader(dist.group.WORLD, "cpu")
    loader.add_filenames({0: [path]})
    loader.copy_files_to_device()


LOADS = {
    "load_sharded": lambda path: fst.load_sharded(path, Replicate()),
    "stream_sharded": lambda path: list(fst.stream_sharded(path, Replicate(), window_bytes=1)),
    "load_module": lambda path: fst.load_module(torch.nn.Linear(4, 5), path, group=dist.group.WORLD),
    # An error other than an interrupt is raised when the metadata are used.
    "dcp": lambda path: len(fst.dcp.StorageReader(path, dist.group.WORLD).read_metadata().state_dict_metadata),
    "fastsafetensors": file_loader,
    "instanttensor": lambda path: instanttensor.safe_open(str(path), "pt", "cpu", process_group=dist.group.WORLD),
}


# Loads, and a function that each calls between two collectives or before the first.
CALLS = [
    ("load_sharded", "fst._ranks.load_sharded.open_and_gather"),
    ("load_sharded", "fst._ranks.load_sharded.run_load"),
    ("load_sharded", "fst._core.group.Group.all_gather_bytes"),
    ("stream_sharded", "fst._ranks.stream_sharded.requested_batches"),
    ("load_module", "fst._module.load_module.reshard"),
    ("load_module", "fst._module.load_module.open_for_group"),
    ("dcp", "fst.dcp.reader.open_for_group"),
    ("fastsafetensors", "fst.compat.fastsafetensors.loader.check_equal"),
    ("instanttensor", "fst._core.group.Group.broadcast"),
]


def interrupt_one_rank(path, load, name):
    """Returns the error of this rank. Rank 1 gets SIGINT before the named function runs."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            owner, _, attribute = name.rpartition(".")
            function = pytest.importorskip(owner) if owner.islower() else fst._core.group.Group
            function = getattr(function, attribute)

            def interrupted(*args, **kwargs):
                signal.raise_signal(signal.SIGINT)
                return function(*args, **kwargs)

            patch.setattr(name, interrupted)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            LOADS[load](path)
    assert_all_same(fst.load_sharded(path, Replicate(), strategy="exchange"), load_file(path))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("load", "name"), CALLS)
def test_interrupt_of_one_rank(ranks, path, load, name):
    raised = ranks(SIZE).run(interrupt_one_rank, path, load, name)
    assert raised[1].startswith("KeyboardInterrupt")
    for rank in (0, 2):
        assert re.match("RankError: rank 1 failed: KeyboardInterrupt", raised[rank]), raised


def test_calls_import_nothing(fork_python, path):
    """Python raises KeyboardInterrupt in an import, where no load can defer it until the other ranks know of it."""
    program = """
import sys, torch, fst
from torch.distributed.tensor import Replicate
before = set(sys.modules)
fst.load_sharded(sys.argv[1], Replicate())
list(fst.stream_sharded(sys.argv[1], Replicate()))
fst.load_module(torch.nn.Linear(4, 5), sys.argv[1])
fst.load_distributed, fst.RankError
print(sorted(name for name in set(sys.modules) - before if name.startswith("fst")))
"""
    assert fork_python(program, str(path)) == "[]\n"
