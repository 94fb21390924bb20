"""`fst.stream_sharded`: shards, order, batches, casts, arguments and failures."""

import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

import fst
from rank_processes import on_ranks
from rawfile import assert_all_same

TENSORS = {f"t{index}": torch.arange(24.0).reshape(6, 4) + index for index in range(4)}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    return str(tmp_path / "a.safetensors")


def place(name, shape):
    return {"t0": Replicate(), "t1": Shard(1), "t2": slice(1, 5)}.get(name)


@pytest.mark.parametrize("options", [{}, {"window_bytes": 1, "exchange_bytes": 64}, {"window_bytes": 200}], ids=str)
@on_ranks(2, 3)
def test_stream_equals_load_sharded(path, options):
    loaded = fst.load_sharded(path, place, dtype=torch.bfloat16)
    with fst.stream_sharded(path, place, dtype=torch.bfloat16, **options) as tensors:
        assert isinstance(tensors, fst.Stream)
        assert tensors.total_bytes == sum(tensor.nbytes for tensor in loaded.values())
        streamed = list(tensors)
    assert [name for name, _ in streamed] == list(loaded) == ["t0", "t1", "t2"]
    assert {tensor.dtype for _, tensor in streamed} == {torch.bfloat16}
    assert_all_same(dict(streamed), loaded)


@on_ranks(2)
def test_ranks_may_request_different_tensors(path):
    names = [f"t{dist.get_rank()}", "t3"]
    # The smallest window of all ranks applies.
    with fst.stream_sharded(path, Replicate(), names=names, window_bytes=100 + 1000 * dist.get_rank()) as tensors:
        for name, (streamed, tensor) in zip(names, tensors, strict=True):
            assert streamed == name
            assert torch.equal(tensor, TENSORS[name])


@on_ranks(2)
def test_ranks_leave_at_same_tensor(path):
    for _ in range(2):
        with fst.stream_sharded(path, Replicate(), window_bytes=1) as tensors:
            assert [name for name, _ in itertools.islice(tensors, 2)] == ["t0", "t1"]
        assert list(tensors) == []


def open_stream(path):
    return fst.stream_sharded(path, Replicate(), window_bytes=1)


def raise_in_block(path):
    with open_stream(path) as tensors:
        for _ in tensors:
            raise LookupError("no room")


def raise_in_loop(path):
    for _ in open_stream(path):
        raise LookupError("no room")


def interrupt_loop(path):
    with open_stream(path) as tensors:
        for _ in tensors:
            os.kill(os.getpid(), signal.SIGINT)


def close_before_first(path):
    open_stream(path).close()


def close_generator(path):
    def pairs():
        with open_stream(path) as tensors:
            yield from tensors

    next(pairs())


# What one rank does, and what the others learn about it.
DEPARTURES = {
    raise_in_block: "closed the stream before its end after LookupError: no room",
    raise_in_loop: "closed the stream before its end",
    interrupt_loop: "closed the stream before its end after KeyboardInterrupt",
    close_before_first: "closed the stream before its end",
    close_generator: "closed the stream before its end",
}


@pytest.mark.parametrize("leave", DEPARTURES, ids=lambda leave: leave.__name__)
@on_ranks(3)
def test_rank_that_leaves_tells_the_others(path, leave):
    if dist.get_rank() == 1:
        try:
            leave(path)
        except (LookupError, KeyboardInterrupt) as error:
            # Whatever refers to the stream is gone with the traceback.
            error.__traceback__ = None
    else:
        with pytest.raises(fst.RankError) as caught:
            list(open_stream(path))
        assert str(caught.value) == f"rank 1 {DEPARTURES[leave]}"
    assert stream_from(path).keys() == TENSORS.keys()


@on_ranks(2)
def test_ranks_leave_in_same_batch(path):
    # Another batch follows the first one, and none the second one.
    for first in (0, 2):
        with fst.stream_sharded(path, Replicate(), window_bytes=200) as tensors:
            for name, _ in tensors:
                if name == f"t{first + dist.get_rank()}":
                    break
    assert stream_from(path).keys() == TENSORS.keys()


def stream_from(path, **arguments):
    return dict(fst.stream_sharded(arguments.pop("paths", path), arguments.pop("placements", Replicate()), **arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window_bytes": 0}, ValueError, "window_bytes is 0, but must be at least 1"),
        ({"placements": {"t0": Shard(2), "*": None}}, ValueError, "does not fit"),
        ({"device": "nowhere"}, ValueError, "nowhere"),
        ({"paths": "missing.safetensors"}, FileNotFoundError, "missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@on_ranks(2)
def test_failure_on_one_rank_raises_on_all(path, arguments, error, message):
    is_failing = dist.get_rank() == 1
    with pytest.raises(error if is_failing else fst.RankError, match=message):
        stream_from(path, **(arguments if is_failing else {}))
    assert stream_from(path).keys() == TENSORS.keys()
