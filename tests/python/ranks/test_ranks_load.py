"""Loads of a group into given tensors, and headers that one rank reads for all."""

import os
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.group import Group
from fst._ranks.load import ShardSelection, fill_on_device, load_shards, open_for_group
from fst._ranks.shards import Replicated, Sharded, ShardRequest, region_of
from rank_processes import on_ranks
from rawfile import assert_same

CPU = torch.device("cpu")
STRATEGIES = ["auto", "own", "exchange"]
REQUESTS = [
    ShardRequest("rows", Sharded(0)),
    ShardRequest("columns", Sharded(-1)),
    ShardRequest("whole", Replicated()),
    ShardRequest("integers", Sharded(1)),
    ShardRequest("scalar", Replicated()),
    ShardRequest("empty", Sharded(0)),
]


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {
        "rows": torch.randn(10, 7),
        "columns": torch.randn(6, 11),
        "whole": torch.randn(33),
        "integers": torch.arange(60).view(4, 15),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    return str(tmp_path / "a.safetensors")


def expected_of(path, request, ranks):
    whole = load_file(path)[request.name]
    return region_of(request.shard, whole.shape, ranks.rank, ranks.size).view(whole).contiguous()


def transposed(expected):
    return torch.full(expected.shape[::-1], 7, dtype=expected.dtype).permute(tuple(range(expected.dim()))[::-1])


def view_of_larger(expected):
    larger = torch.full([2 * size for size in expected.shape], 7, dtype=expected.dtype)
    return larger[tuple(slice(1, 1 + size) for size in expected.shape)]


OUTPUTS = {
    "contiguous": lambda expected, rank: torch.full_like(expected, 7),
    "transposed": lambda expected, rank: transposed(expected),
    "transposed on odd ranks": lambda expected, rank: (
        transposed(expected) if rank % 2 else torch.full_like(expected, 7)
    ),
    "view": lambda expected, rank: view_of_larger(expected),
    "half": lambda expected, rank: torch.full_like(expected, 7, dtype=torch.float16),
    "integers": lambda expected, rank: torch.full_like(expected, 7, dtype=torch.int16),
    "parameter": lambda expected, rank: torch.nn.Parameter(
        torch.full_like(expected, 7), requires_grad=expected.is_floating_point()
    ),
}


@pytest.mark.parametrize(("output", "strategy"), list(zip(OUTPUTS, cycle(STRATEGIES))))
@on_ranks(2, 3)
def test_load_into_tensors(checkpoint, output, strategy):
    group = Group.of(None, CPU)
    requests = REQUESTS[group.rank % 2 :]
    stored = open_for_group(checkpoint, group)
    out = [OUTPUTS[output](expected_of(checkpoint, request, group), group.rank) for request in requests]
    versions = [tensor._version for tensor in out]
    fill_on_device(stored, list(zip(requests, out, strict=True)), group, strategy, 200 if group.size == 3 else 1 << 20)
    for request, tensor, version in zip(requests, out, versions, strict=True):
        assert tensor.grad_fn is None
        assert tensor._version > version
        assert_same(tensor.detach().contiguous(), expected_of(checkpoint, request, group).to(tensor.dtype))


@on_ranks(2)
def test_invalid_outputs(checkpoint):
    """Checks that an invalid output on any rank writes nothing."""
    group = Group.of(None, CPU)
    stored = open_for_group(checkpoint, group)
    requests = REQUESTS[:2]
    good = [torch.full_like(expected_of(checkpoint, request, group), 7) for request in requests]
    bad = [
        ([good[0], good[1][:, :1]], 'tensor "columns": the shard of this rank has the shape'),
        ([good[0], good[1].to("meta")], 'tensor "columns": the tensor to overwrite is .* on meta'),
        ([good[0], good[1].to_sparse()], "the tensor to overwrite is torch.sparse_coo"),
    ]
    for out, message in bad:
        error, out = (ValueError, out) if group.rank == 1 else (fst.RankError, good)
        with pytest.raises(error, match=message):
            fill_on_device(stored, list(zip(requests, out, strict=True)), group)
    assert all(tensor.eq(7).all() for tensor in good)
    fill_on_device(stored, list(zip(requests, good, strict=True)), group)
    for request, tensor in zip(requests, good, strict=True):
        assert_same(tensor, expected_of(checkpoint, request, group))


def mapped_bytes(path):
    group = Group.of(None, CPU)
    with fst.profile() as profile:
        load_shards(ShardSelection(open_for_group(path, group), [ShardRequest("rows", Replicated())], group, CPU))
    return profile.summary().mapped_bytes


def test_ranks_of_one_machine_map_replicated_tensors(ranks, checkpoint):
    assert ranks(3).run(mapped_bytes, checkpoint) == [10 * 7 * 4] * 3


def test_page_cache_identity(tmp_path, monkeypatch):
    for name in ("a", "b"):
        save_file({"m": torch.ones(3)}, tmp_path / name)
    os.link(tmp_path / "a", tmp_path / "c")
    opened = [OpenCheckpoint(str(tmp_path / name)) for name in ("a", "b", "c")]
    first, second, third = (checkpoint.page_cache() for checkpoint in opened)
    assert first == third != second
    assert [checkpoint.copy_name() for checkpoint in opened] == [first, second, third]
    monkeypatch.setenv("FST_READER", "pread")
    assert opened[0].page_cache() == ""
    assert opened[0].copy_name() == first
