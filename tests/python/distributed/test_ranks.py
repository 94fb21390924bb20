"""Collectives and error propagation of a group, and the test ranks themselves."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fst import RankError
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts

CPU = torch.device("cpu")


def fail_on(failing):
    if dist.get_rank() == failing:
        raise ValueError("this one")
    return dist.get_rank()


def test_exception_on_rank_is_reported(ranks):
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ValueError: this one"):
        ranks(2).run(fail_on, 1)
    assert ranks(2).run(fail_on, 2) == [0, 1]


def hang_on(hanging):
    if dist.get_rank() == hanging:
        time.sleep(100)
    raise ValueError("this one")


def end_on(ending):
    if dist.get_rank() == ending:
        os._exit(3)
    return dist.get_rank()


def test_hanging_rank_is_killed(ranks, monkeypatch):
    monkeypatch.setattr("ranks.GRACE_SECONDS", 0.2)
    with pytest.raises(AssertionError, match=r"rank 0: has not returned; its stack:\n(.|\n)*hang_on"):
        ranks(2).run(hang_on, 0)
    with pytest.raises(AssertionError, match="rank 1: ended with exit code 3"):
        ranks(2).run(end_on, 1)
    assert ranks(2).run(fail_on, 2) == [0, 1]


def test_ranks_survive_deleted_directory(ranks, tmp_path, monkeypatch):
    ranks(2).close()
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        ranks(2).run(os.chdir, tmp_path)
    tmp_path.rmdir()
    assert all(ranks(2).run(os.getcwd))


def share():
    group = Group.of(None, CPU)
    for length in (100, 507, 508, 1015, 1016, 1017):  # around the size up to which one collective is enough
        own = bytes([group.rank]) * (group.rank * length)
        assert group.all_gather_bytes(own) == [bytes([rank]) * (rank * length) for rank in range(group.size)]
    assert group.all_gather_bytes(b"") == [b""] * group.size
    for source in range(group.size):
        data = torch.arange(source, dtype=torch.uint8)
        assert torch.equal(group.broadcast(data if group.rank == source else None, source), data)
    assert group.run_on_all(lambda: group.rank) == group.rank
    assert group.gather_results(lambda: (group.rank, b"-%d" % group.rank)) == (
        group.rank,
        [b"-%d" % i for i in range(group.size)],
    )


def test_collectives(ranks):
    ranks(3).run(share)


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


def test_single_process():
    group = Group.of(None, CPU)
    assert (group.process_group, group.rank, group.size) == (None, 0, 1)
    assert group.all_gather_bytes(b"mine") == [b"mine"]
    with pytest.raises(ZeroDivisionError):
        group.run_on_all(lambda: 1 / 0)


def interrupted(where):
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


def test_interrupts_are_deferred(ranks):
    ranks(2).run(interrupted, "inside")
    ranks(2).run(interrupted, "after")


def test_interrupts_are_deferred_in_main_thread_only():
    before = signal.getsignal(signal.SIGINT)

    def hold():
        with defer_interrupts() as held:
            held.deliver()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(hold).result() is before


def test_ignored_interrupts_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupts() as held:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            held.deliver()
    finally:
        signal.signal(signal.SIGINT, before)


def set_reader(value):
    os.environ["FST_READER"] = value


def test_environment_is_restored(ranks):
    before = ranks(2).run(os.getenv, "FST_READER")
    ranks(2).run(set_reader, "pread")
    assert ranks(2).run(os.getenv, "FST_READER") == before
