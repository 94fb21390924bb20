"""`fst.compat.instanttensor` with several ranks."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fst
from compat_helpers import all_files, count_reads, raw, write_files
from fst import RankError
from fst.compat.instanttensor import safe_open
from rawfile import DTYPES, assert_same


def open_on_ranks(files, **options):
    return safe_open(files, "pt", "cpu", process_group=dist.group.WORLD, **options)


def iterate(files, options, reader):
    """Iterates with a reader. Mapped files need no exchange between ranks of one machine, read files do."""
    with mock.patch.dict(os.environ, FST_READER=reader), open_on_ranks(files, **options) as file:
        rounds = [dict(file.tensors()) for _ in range(2)]
        for tensors in rounds:
            assert list(tensors) == file.keys()
            for name, tensor in tensors.items():
                assert_same(tensor, raw(name).tensor())
                tensor.view(-1).view(torch.uint8).zero_()
        return file.keys()


@pytest.mark.parametrize(
    ("size", "reader", "options", "dtypes"),
    [
        (2, "pread", {}, DTYPES),
        (3, "auto", {}, ["F32"]),
        (4, "pread", {"buffer_size": 300}, ["F32", "BF16"]),
    ],
)
def test_iteration_order_on_all_ranks(ranks, tmp_path, size, reader, options, dtypes):
    files = all_files(write_files(tmp_path, 2, dtypes), 2)
    expected = [name for file in files for name in fst.tensor_names(file)]
    assert ranks(size).run(iterate, files[::-1], options, reader) == [expected] * size


def read_once(files):
    with count_reads() as count, open_on_ranks(files) as file:
        [(_, tensor)] = file.tensors()
    assert torch.equal(tensor, torch.arange(1 << 20))
    return count()


def test_bytes_are_read_once(ranks):
    save_file({"x": torch.arange(1 << 20)}, "x.safetensors")
    read = ranks(4).run(read_once, os.path.abspath("x.safetensors"))
    assert 8 << 20 <= sum(read) < (8 << 20) + 100_000
    assert max(read) < 3 << 20


def get_tensors(files):
    with open_on_ranks(files) as file:
        for name in reversed(file.keys()):
            assert file.get_tensor_metadata(name) == (raw(name).torch_dtype, torch.Size(raw(name).torch_shape))
            assert_same(file.get_tensor(name), raw(name).tensor())
        assert file.metadata() is None
        with pytest.raises(KeyError, match="nothing at all"):
            file.get_tensor("nothing at all")
    with pytest.raises(RuntimeError, match="had ended"):
        file.get_tensor(name)


def fail(files):
    missing = [*files, "none.safetensors"] if dist.get_rank() == 1 else files
    with pytest.raises((FileNotFoundError, RankError, ValueError)):
        open_on_ranks(missing)
    with pytest.raises((FileNotFoundError, RankError), match=r"none\.safetensors"):
        open_on_ranks("none.safetensors")
    with open_on_ranks(files) as file:
        assert len(dict(file.tensors())) == len(file.keys())


def load_in_sub_groups(files):
    """Loads in groups of two ranks, independently."""
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    with safe_open(files[dist.get_rank() // 2], "pt", "cpu", process_group=groups[dist.get_rank() // 2]) as file:
        assert (file.rank, file.world_size) == (dist.get_rank() % 2, 2)
        for name, tensor in file.tensors():
            assert_same(tensor, raw(name).tensor())


@pytest.mark.parametrize(("size", "work"), [(2, get_tensors), (2, fail), (4, load_in_sub_groups)])
def test_ranks(ranks, tmp_path, size, work):
    ranks(size).run(work, all_files(write_files(tmp_path, 2, ["F32", "F4"]), 2))
