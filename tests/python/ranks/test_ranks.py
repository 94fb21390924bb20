"""Collectives and error propagation of a group, and the test ranks themselves."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fst
from fst import RankError
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._ranks.load import fill_on_device, open_for_group
from fst._ranks.shards import Sharded, ShardRequest
from rank_processes import on_ranks

CPU = torch.device("cpu")


def fail_on(failing):
    if dist.get_rank() == failing:
        raise ValueError("this one")
    return dist.get_rank()


def test_rank_that_fails_is_reported(ranks):
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ValueError: this one"):
        ranks(2).run(fail_on, 1)
    assert ranks(2).run(fail_on, 2) == [0, 1]


@on_ranks(3)
def test_collectives():
    group = Group.of(None, CPU)
    for length in (100, 251, 252, 503, 504, 505):  # around the size up to which one collective is enough
        own = bytes([group.rank]) * (group.rank * length)
        assert group.all_gather_bytes(own) == [bytes([rank]) * (rank * length) for rank in range(group.size)]
    assert group.all_gather_bytes(b"") == [b""] * group.size
    # The longest message is not padded on the other ranks.
    long = bytes([group.rank]) * (1 << 20) * (group.rank == 1)
    assert list(map(len, group.all_gather_bytes(long))) == [0, 1 << 20, 0]
    sent = [torch.full((rank * group.rank,), rank, dtype=torch.uint8) for rank in range(group.size)]
    assert [each.tolist() for each in group.exchange(sent)] == [[group.rank] * (group.rank * r) for r in range(3)]
    assert [len(each) for each in group.gather(sent[1])] == ([0, 1, 2] if group.rank == 0 else [0] * 3)
    for source in range(group.size):
        data = torch.arange(source, dtype=torch.uint8)
        assert torch.equal(group.broadcast(data if group.rank == source else None, source), data)
    assert group.run_on_all(lambda: group.rank) == group.rank
    assert group.gather_results(lambda: (group.rank, b"-%d" % group.rank)) == (
        group.rank,
        [b"-%d" % i for i in range(group.size)],
    )


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError


def raise_on(failing, error):
    group = Group.of(None, CPU)

    def work():
        if group.rank == failing:
            raise error

    with pytest.raises(type(error) if group.rank == failing else RankError) as caught:
        group.run_on_all(work)
    return None if group.rank == failing else str(caught.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("first\nsecond ü"), "ValueError: first\nsecond ü"),
        (KeyError("name"), "KeyError: 'name'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(1), "SystemExit: 1"),
        (UnprintableError(), "test_ranks.UnprintableError: <exception str() failed>"),
    ],
)
def test_error_reaches_other_ranks(ranks, error, text):
    assert ranks(2).run(raise_on, 1, error) == [f"rank 1 failed: {text}", None]


def count_bytes(work):
    """Calls `work`, and returns its result and the bytes of the messages that this rank has given to collectives."""
    collectives = mock.Mock(wraps=dist)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "all_to_all_single", "all_gather_into_tensor", "all_reduce"):
            patch.setattr(dist, name, getattr(collectives, name))
        result = work()
    # The messages of this rank follow the others' messages.
    tensors = [[one for one in call.args if isinstance(one, torch.Tensor)] for call in collectives.mock_calls]
    return result, sum(own.nbytes for *_, own in tensors)


# Messages of many ranks must be short: each rank sends its own to all others.
SENT_MAX = 256 << 10


@pytest.mark.parametrize("shift", range(3))
@on_ranks(3)
def test_long_error_is_cut(shift):
    text = "x" * shift + "€" * 300_000
    message, sent = count_bytes(lambda: raise_on(1, ValueError(text)))
    assert sent <= SENT_MAX
    if dist.get_rank() != 1:
        whole = f"ValueError: {text}"
        head, note = message.removeprefix("rank 1 failed: ").split(" ... ")
        # The text is cut between two characters.
        assert whole.startswith(head)
        assert note == f"[{len(whole.encode()) - len(head.encode())} more bytes]"
        assert 4000 < len(f"{head} ... {note}".encode()) <= 4096


NAMES = [f"{index}.{'n' * 1000}" for index in range(500)]
NAMES_BYTES = sum(map(len, NAMES))


@pytest.fixture
def long_names(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(6, 4) for name in NAMES}, path)
    return str(path)


@on_ranks(3)
def test_different_placements_of_long_names(long_names):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = Shard(1) if dist.get_rank() == 2 else Shard(0)

    def load():
        with pytest.raises(ValueError, match=r"the placements are .* on rank 0 of the mesh and .* on rank 2"):
            fst.load_distributed(long_names, mesh, lambda name, shape: mine if name.startswith("7.") else Shard(0))

    # Rank 0 alone sends the headers and its placements, each about as long as the names.
    assert count_bytes(load)[1] <= SENT_MAX + 2 * 1.1 * NAMES_BYTES


@on_ranks(3)
def test_different_dtypes_of_long_names(long_names):
    rules = dict.fromkeys(NAMES if dist.get_rank() else NAMES[:-1], torch.float16)

    def load():
        with pytest.raises(ValueError, match=r"do not agree on dtype: .* on rank 0; .* on ranks 1, 2") as caught:
            fst.load_sharded(long_names, Shard(0), dtype=rules)
        assert len(str(caught.value)) < 2000

    assert count_bytes(load)[1] <= SENT_MAX + 1.1 * NAMES_BYTES


@on_ranks(3)
def test_indirect_tensors_with_long_names(long_names):
    group = Group.of(None, CPU)
    checkpoint = open_for_group(long_names, group)
    # Transposed tensors are loaded in another way.
    shards = [(ShardRequest(name, Sharded(0)), torch.zeros(4, 2).T) for name in checkpoint.tensors]
    _, sent = count_bytes(lambda: fill_on_device(checkpoint, shards, group, strategy="exchange", window_bytes=1 << 20))
    # The data go to two other ranks, in rows of 16 bytes.
    assert sent <= SENT_MAX + 500 * 6 * 16
    assert all(tensor.eq(1).all() for _, tensor in shards)


@pytest.mark.parametrize("where", ["inside", "after"])
@on_ranks(2)
def test_interrupts_are_deferred(where):
    """Sends SIGINT during a collective. The handler of the program is called afterwards."""
    group = Group.of(None, CPU)
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with defer_interrupts(), defer_interrupts() as held:
            os.kill(os.getpid(), signal.SIGINT)
            group.all_gather_bytes(b"")
            assert seen == []
            if where == "inside":
                held.deliver()
                assert seen == [signal.SIGINT]
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is not held
    finally:
        signal.signal(signal.SIGINT, before)


def handler_while_deferred():
    with defer_interrupts() as held:
        held.deliver()
        return signal.getsignal(signal.SIGINT)


def test_interrupts_are_deferred_in_main_thread_only():
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handler_while_deferred).result() is signal.getsignal(signal.SIGINT)


def test_ignored_interrupts_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert handler_while_deferred() == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
