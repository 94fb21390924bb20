"""Loads by ranks that share a page cache: no exchange, each byte read from storage once, few collectives."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

import fst
import fst._ranks.load
from fst._checkpoint.region import Region
from fst._core.group import Group
from fst._ranks.load import ShardSelection, fill_on_device, load_shards, open_for_group
from fst._ranks.shards import Replicated, Sharded, ShardRequest
from placements import shard_of
from procfs import storage_bytes
from rank_processes import on_ranks
from rawfile import assert_all_same, assert_same

CPU = torch.device("cpu")
SIZE = 4
# The kernel reads ahead beyond the end of a read, and some of that is in the next file.
READ_MAX = 1.05


def mixed(name, shape):
    return [Shard(0), Shard(1), Replicate()][int(name) % 3]


def drop_from_cache(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def request_of(name):
    return ShardRequest(name, [Sharded(0), Sharded(1), Replicated()][int(name) % 3])


def refuse(*arguments):
    raise AssertionError("the ranks exchange data")


def load_cold(path, place, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fst._ranks.load.Exchange", refuse)
        if dist.get_rank() == 0:
            drop_from_cache(path)
        dist.barrier()
        before = storage_bytes()
        # Views are read when they are used.
        loaded = {name: tensor.clone() for name, tensor in fst.load_sharded(path, place, dtype=dtype).items()}
        dist.barrier()
        read = storage_bytes() - before
    expected = load_file(path)
    for name, tensor in expected.items():
        expected[name] = shard_of(tensor, place(name, None) if place is mixed else place).to(dtype)
    assert_all_same(loaded, expected)
    return read


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns a file of small and large tensors, of which only the first begins at a page."""
    shapes = [(1024, 1031), (64, 33), (515, 2048), (8, 8), (33, 4096), (1200, 1100), (700, 257)]
    tensors = {str(index): torch.randn(shapes[index % len(shapes)]) for index in range(21)}
    path = tmp_path_factory.mktemp("cold") / "a.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("place", "dtype"),
    [(Shard(0), torch.bfloat16), (Shard(1), None), (Replicate(), torch.bfloat16), (mixed, None)],
    ids=["rows", "columns", "whole", "mixed"],
)
def test_cold_file_is_read_once(ranks, path, place, dtype):
    read = sum(ranks(SIZE).run(load_cold, path, place, dtype))
    assert read <= READ_MAX * path.stat().st_size


@on_ranks(SIZE)
def test_collectives(path):
    collectives = mock.Mock(wraps=dist)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "all_to_all_single", "all_gather_into_tensor", "all_reduce"):
            patch.setattr(dist, name, getattr(collectives, name))
        fst.load_sharded(path, mixed)
    assert [name for name, *_ in collectives.mock_calls] == ["broadcast", "all_to_all_single", "all_to_all_single"]


@on_ranks(SIZE)
def test_index_regions_are_not_sent_to_other_ranks(path):
    group = Group.of(None, CPU)
    stored = open_for_group(path, group)
    regions = {
        name: Region.unit_step([0, 0], [tensor.shape[0], 3 + group.rank]) for name, tensor in stored.tensors.items()
    }
    out = {name: torch.zeros(region.lengths) for name, region in regions.items()}
    with mock.patch.object(Group, "broadcast_all", refuse), mock.patch("fst._ranks.load.Exchange", refuse):
        fill_on_device(stored, [(ShardRequest(name, regions[name]), out[name]) for name in regions], group)
    assert_all_same(out, {name: regions[name].view(tensor).contiguous() for name, tensor in load_file(path).items()})


@on_ranks(2)
def test_leases(path):
    """Copies columns out of a mapping, and reads them while another process may change the file."""
    expected = {name: shard_of(tensor, Shard(1)) for name, tensor in load_file(path).items()}

    def readers():
        out = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
        with fst.profile() as recorded:
            group = Group.of(None, CPU)
            stored = open_for_group(path, group)
            fill_on_device(stored, [(ShardRequest(name, Sharded(1)), out[name]) for name in out], group)
        assert_all_same(out, expected)
        return {use.reader: use.why for use in recorded.summary().readers}

    assert readers() == {"lease": "other processes copy from the page cache, too"}
    dist.barrier()
    with open(path, "r+b"):
        dist.barrier()
        assert "lease is not available" in readers()["pread"]
        dist.barrier()


@on_ranks(SIZE)
def test_two_page_caches(path):
    """Loads in a group whose ranks have two page caches, so that some tensors are exchanged."""
    rank = dist.get_rank()
    requests, expected = [], []
    for name, tensor in load_file(path).items():
        if int(name) > 12:
            requests.append(request_of(name))
            expected.append(shard_of(tensor, mixed(name, None)).contiguous())
        elif int(name) % 2 == rank // 2:
            # Half of the ranks need this tensor, and whole: chunks are for the whole group.
            requests.append(ShardRequest(name, Replicated()))
            expected.append(tensor)
    group = Group.of(None, CPU)
    out = [torch.zeros_like(tensor) for tensor in expected]
    exchanges = []

    class Counted(fst._ranks.load.Exchange):
        def run(self):
            exchanges.append(self)
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fst._checkpoint.checkpoint.OpenCheckpoint.page_cache", lambda checkpoint: f"machine {rank // 2}")
        patch.setattr("fst._ranks.load.Exchange", Counted)
        stored = open_for_group(path, group)
        loaded = load_shards(ShardSelection(stored, requests, group, CPU))
        fill_on_device(stored, list(zip(requests, out, strict=True)), group)
    assert len(exchanges) == 2
    for tensors in (loaded, out):
        for tensor, value in zip(tensors, expected, strict=True):
            assert_same(tensor, value)
