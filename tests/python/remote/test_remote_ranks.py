"""Ranks share the requests for an object: each byte is requested by one rank of the group."""

import pytest
import torch
from safetensors.torch import save
from torch.distributed.tensor import Replicate, Shard

import fst
from fst_bench.http_server import Fault
from objects import HEADER, assert_equal, shards, tensors

TENSORS = tensors()
DATA = save(TENSORS)
PATH = "m.safetensors"


def replicated(name, shape):
    return Replicate()


def rows(name, shape):
    return Shard(0) if len(shape) == 2 and shape[0] else Replicate()


def columns(name, shape):
    return Shard(1) if name in ("large", "half") else Replicate()


def load(paths, place):
    return fst.load_sharded(paths, place)


def expected_of(name, tensor, place, rank, size):
    placement = place(name, tensor.shape)
    return tensor if isinstance(placement, Replicate) else tensor.chunk(size, placement.dim)[rank]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("place", [replicated, rows, columns])
def test_each_byte_is_requested_by_one_rank(ranks, http_server, size, place):
    http_server.put(PATH, DATA)
    for rank, loaded in enumerate(ranks(size).run(load, http_server.url(PATH), place)):
        assert_equal(loaded, {name: expected_of(name, t, place, rank, size) for name, t in TENSORS.items()})
    counts = torch.zeros(len(DATA), dtype=torch.int32)
    for request in http_server.requests(PATH):
        start, stop = request.range
        counts[start:stop] += 1
    # The first request of rank 0 brings bytes that other ranks need, too. A request covers short gaps.
    assert counts[:HEADER].sum() <= 2 * HEADER
    assert len(DATA) - HEADER <= counts[HEADER:].sum() <= 1.01 * (len(DATA) - HEADER)


def test_sharded_checkpoint(ranks, http_server):
    files, expected = shards()
    for name, data in files.items():
        http_server.put(f"dir/{name}", data)
    for loaded in ranks(2).run(load, http_server.url("dir/"), replicated):
        assert_equal(loaded, expected)
    # Only the first rank opens the objects.
    assert len(http_server.requests("dir/model.safetensors.index.json")) == 2


def load_changed(url, place):
    try:
        fst.load_sharded(url, place)
    except (fst.SourceChangedError, fst.RankError) as error:
        return type(error).__name__
    return "loaded"


def test_change_is_an_error_on_all_ranks(ranks, http_server):
    http_server.put(PATH, DATA)
    http_server.fault(PATH, Fault("replace", at=len(DATA) - 1, data=save(tensors(1))))
    found = ranks(2).run(load_changed, http_server.url(PATH), replicated)
    assert "SourceChangedError" in found
    assert "loaded" not in found
