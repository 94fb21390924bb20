"""Sharded loads that fail on one rank: all ranks raise, none hangs, and the group can load again."""

import gc
import os
import re
import shutil
import signal
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

import fst
from fst._distributed.exchange import Exchange, WindowBuffers
from rawfile import assert_same

SIZE = 3
# The tensors are exchanged in several windows.
OPTIONS = {"strategy": "exchange", "window_bytes": 4096}


@pytest.fixture
def directories(tmp_path):
    """A copy of one checkpoint per rank, as on machines without a shared file system."""
    save_file({"a": torch.randn(60, 32), "b": torch.randn(50), "c": torch.randn(7, 64)}, tmp_path / "a.safetensors")
    for rank in range(SIZE):
        (tmp_path / f"{rank}").mkdir()
        shutil.copy(tmp_path / "a.safetensors", tmp_path / f"{rank}")
    return tmp_path


def load(directory, **options):
    path = directory / f"{dist.get_rank()}" / "a.safetensors"
    arguments = {"placements": {"c": Replicate(), "*": Shard(0)}, **OPTIONS, **options}
    return fst.load_sharded(arguments.pop("paths", path), **arguments)


def attempt(directory, fault, failing):
    """Loads with a fault on one rank and returns the error of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        options = fault(patch, directory) if dist.get_rank() == failing else None
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            load(directory, **(options or {}))
    return f"{type(caught.value).__name__}: {caught.value}"


def attempt_and_load(directory, fault, failing):
    """Loads with a fault, then checks that the group can load again."""
    path = directory / f"{dist.get_rank()}" / "a.safetensors"
    raised = attempt(directory, fault, failing)
    shutil.copy(directory / "a.safetensors", path)
    loaded = load(directory)
    whole = load_file(path)
    assert_same(loaded["a"], whole["a"].chunk(SIZE)[dist.get_rank()])
    assert_same(loaded["b"], whole["b"].chunk(SIZE)[dist.get_rank()])
    assert_same(loaded["c"], whole["c"])
    return raised


def missing_file(patch, directory):
    return {"paths": directory / "missing.safetensors"}


def other_name(patch, directory):
    return {"paths": shutil.copy(directory / "a.safetensors", directory / "other.safetensors")}


def other_length(patch, directory):
    save_file(
        {"a": torch.randn(61, 32), "b": torch.randn(50), "c": torch.randn(9)},
        directory / f"{dist.get_rank()}" / "a.safetensors",
    )


def other_header(patch, directory):
    """Changes the header and keeps its length."""
    path = directory / f"{dist.get_rank()}" / "a.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


def bad_header(patch, directory):
    path = directory / f"{dist.get_rank()}" / "a.safetensors"
    path.write_bytes(path.read_bytes().replace(b"data_offsets", b"data_offsetz"))


def bad_device(patch, directory):
    return {"device": 1.5}


def other_placements(patch, directory):
    return {"placements": {"*": Replicate()}}


def no_placements(patch, directory):
    return {"placements": {}}


def broken_placements(patch, directory):
    def place(name, shape):
        raise LookupError("no layout")

    return {"placements": place}


def other_dtype(patch, directory):
    return {"dtype": torch.bfloat16}


def other_strategy(patch, directory):
    return {"strategy": "auto"}


def other_window(patch, directory):
    return {"window_bytes": 8192}


def truncated_file(patch, directory):
    """Truncates the file after it was opened."""
    begin = fst._distributed.load.agree_on_plan

    def agree(*arguments):
        os.truncate(directory / f"{dist.get_rank()}" / "a.safetensors", 500)
        return begin(*arguments)

    patch.setattr("fst._distributed.load.agree_on_plan", agree)


def no_memory(patch, directory):
    def allocate(*arguments, **options):
        raise torch.OutOfMemoryError("no room for it")

    patch.setattr("fst._distributed.load.torch.empty_like", allocate)


def no_buffers(patch, directory):
    def allocate(traffics, device):
        raise MemoryError

    patch.setattr("fst._distributed.exchange.WindowBuffers", allocate)


def raising_at(method, window, error):
    """Returns a replacement of a method that raises in one window."""
    whole = getattr(Exchange, method)

    def broken(self, at):
        if at == window:
            # A new exception, so that no reference remains here.
            raise type(error)(*error.args)
        whole(self, at)

    return broken


def broken_first_read(patch, directory):
    patch.setattr(Exchange, "_read", raising_at("_read", 0, ZeroDivisionError("reading")))


def broken_read(patch, directory):
    patch.setattr(Exchange, "_read", raising_at("_read", 4, KeyboardInterrupt()))


def broken_place(patch, directory):
    patch.setattr(Exchange, "_unpack", raising_at("_unpack", 3, SystemExit(3)))


def broken_last_place(patch, directory):
    patch.setattr(Exchange, "_run_windows", fail_in_last_window(Exchange._run_windows))


def fail_in_last_window(run):
    def broken(self, interrupts):
        last = len(self._traffics) - 1
        assert last > 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "_unpack", raising_at("_unpack", last, ArithmeticError("the last")))
            run(self, interrupts)

    return broken


def interrupt(patch, directory):
    """Interrupts the rank during an exchange."""
    read = Exchange._read

    def interrupted(self, window):
        if window == 2:
            os.kill(os.getpid(), signal.SIGINT)
        read(self, window)

    patch.setattr(Exchange, "_read", interrupted)


def interrupt_between(patch, directory):
    """Interrupts the rank during a collective."""
    share = fst._core.group.Group.all_gather_bytes

    def interrupted(self, data):
        os.kill(os.getpid(), signal.SIGINT)
        return share(self, data)

    patch.setattr("fst._core.group.Group.all_gather_bytes", interrupted)


# Errors of the failing rank. The other ranks raise a RankError with the same text.
FAULTS = {
    missing_file: "FileNotFoundError: .*missing.safetensors",
    bad_device: "TypeError: device must be",
    no_placements: "ValueError: placements: no entry matches",
    broken_placements: "LookupError: no layout",
    truncated_file: "(OSError|SafetensorError): .*a.safetensors",
    no_memory: "OutOfMemoryError: no room for it",
    no_buffers: "MemoryError",
    broken_first_read: "ZeroDivisionError: reading",
    broken_read: "KeyboardInterrupt",
    broken_place: "SystemExit: 3",
    broken_last_place: "ArithmeticError: the last",
    interrupt: "KeyboardInterrupt",
    interrupt_between: "KeyboardInterrupt",
}
# Errors that all ranks raise.
DIFFERENCES = {
    other_dtype: "ValueError: the ranks of the group do not agree on dtype: .*bfloat16 on rank",
    other_strategy: "ValueError: the ranks of the group do not agree on strategy: .*auto on rank",
    other_window: "ValueError: the ranks of the group do not agree on window_bytes: .*8192 on rank",
    other_placements: 'ValueError: .*tensor "a": rank . requests .* and rank .',
}


@pytest.mark.parametrize("failing", [0, SIZE - 1])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_failure_of_one_rank(ranks, directories, fault, failing):
    for rank, raised in enumerate(ranks(SIZE).run(attempt_and_load, directories, fault, failing)):
        expected = FAULTS[fault]
        if rank != failing:
            expected = rf"RankError: rank {failing} failed: (\w+\.)*{expected}"
        assert re.match(expected, raised), raised


@pytest.mark.parametrize("failing", [0, SIZE - 1])
@pytest.mark.parametrize("fault", DIFFERENCES, ids=lambda fault: fault.__name__)
def test_different_arguments(ranks, directories, fault, failing):
    for raised in ranks(SIZE).run(attempt_and_load, directories, fault, failing):
        assert re.match(DIFFERENCES[fault], raised), raised


@pytest.mark.parametrize("failing", [0, SIZE - 1])
@pytest.mark.parametrize(
    "fault", [other_name, other_length, other_header, bad_header], ids=lambda fault: fault.__name__
)
def test_different_files(ranks, directories, fault, failing):
    raised = ranks(SIZE).run(attempt_and_load, directories, fault, failing)
    # If rank 0 differs, every other rank reports a difference.
    assert {text.partition(":")[0] for text in raised} == {"SafetensorError", "RankError"}
    for text in raised:
        assert re.search("give every rank the same checkpoint|data_offsets", text), text
        assert "safetensors: " in text


def test_failure_of_several_ranks(ranks, directories):
    raised = ranks(SIZE).run(fail_on_all_but_the_last, directories)
    assert raised[:2] == ["LookupError: rank 0", "LookupError: rank 1"]
    assert raised[2] == "RankError: rank 0 failed, as did 1 more: LookupError: rank 0"


def fail_on_all_but_the_last(directory):
    def place(name, shape):
        if dist.get_rank() < SIZE - 1:
            raise LookupError(f"rank {dist.get_rank()}")
        return Replicate()

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        load(directory, placements=place)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_failure_releases_memory(ranks, directories):
    ranks(SIZE).run(fail_and_count_memory, directories)


def fail_and_count_memory(directory):
    held = []

    class Watched(WindowBuffers):
        def __init__(self, traffics, device):
            super().__init__(traffics, device)
            held.extend(map(weakref.ref, self._send + self._receive))

    def empty_like(tensor, device):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        held.append(weakref.ref(made))
        return made

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fst._distributed.exchange.WindowBuffers", Watched)
            patch.setattr("fst._distributed.load.torch.empty_like", empty_like)
            if dist.get_rank() == 1:
                broken_read(patch, directory)
            try:
                load(directory)
            except (KeyboardInterrupt, fst.RankError):
                failed = True
        assert failed
        assert len(held) == 4 + 3
        # A thread of gloo may keep the buffers of a finished collective for a moment.
        deadline = time.monotonic() + 10
        while any(reference() is not None for reference in held) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reference() for reference in held if reference() is not None] == []
    finally:
        gc.enable()


def lose_a_rank(directory):
    """Ends one process during a load."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            read = Exchange._read

            def leave(self, window):
                if window == 2:
                    os._exit(0)
                read(self, window)

            patch.setattr(Exchange, "_read", leave)
        with pytest.raises(RuntimeError) as caught:
            load(directory)
    raise caught.value


def test_process_that_ends(ranks, directories):
    """The collective of the other ranks fails, and the error names the window."""
    with pytest.raises(AssertionError) as caught:
        ranks(SIZE).run(lose_a_rank, directories)
    assert "rank 1: ended with exit code 0" in str(caught.value)
    if sys.version_info >= (3, 11):
        assert re.search(r"rank 0: (.|\n)*The ranks that load together were .* window \d+ of \d+", str(caught.value))
