"""Sharded loads that fail on one rank: all ranks raise, none hangs, and the group can load again."""

import gc
import os
import re
import shutil
import signal
import time
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

import fst
from fst._ranks.exchange import Exchange, WindowBuffers
from placements import shard_of
from rank_processes import on_ranks
from rawfile import assert_all_same

SIZE = 3
# The tensors are exchanged in several windows.
OPTIONS = {"strategy": "exchange", "window_bytes": 4096}
PLACEMENTS = {"c": Replicate(), "*": Shard(0)}


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
    arguments = {"placements": PLACEMENTS, **OPTIONS, **options}
    return fst.load_sharded(arguments.pop("paths", path), **arguments)


def attempt_and_load(directory, fault, failing):
    """Loads with a fault on one rank, and checks that the group can load again. Returns the error of this rank.

    A fault is the arguments of the load, or a function that makes the fault and may return arguments.
    """
    path = directory / f"{dist.get_rank()}" / "a.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        options = {}
        if dist.get_rank() == failing:
            options = fault if isinstance(fault, dict) else fault(patch, path)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            load(directory, **(options or {}))
    shutil.copy(directory / "a.safetensors", path)
    expected = {name: shard_of(tensor, PLACEMENTS.get(name, Shard(0))) for name, tensor in load_file(path).items()}
    assert_all_same(load(directory), expected)
    return f"{type(caught.value).__name__}: {caught.value}"


def other_name(patch, path):
    return {"paths": shutil.copy(path, path.with_name("other.safetensors"))}


def other_length(patch, path):
    save_file({"a": torch.randn(61, 32), "b": torch.randn(50), "c": torch.randn(9)}, path)


def replace_header(old, new, patch, path):
    """Changes the header and keeps its length."""
    path.write_bytes(path.read_bytes().replace(old, new))


def broken_placements(name, shape):
    raise LookupError("no layout")


def truncated_file(patch, path):
    """Truncates the file after it was opened."""
    begin = fst._ranks.load.agree_on_plan

    def agree(*arguments):
        os.truncate(path, 500)
        return begin(*arguments)

    patch.setattr("fst._ranks.load.agree_on_plan", agree)


def failing_call(name, error, patch, path):
    patch.setattr(name, mock.Mock(side_effect=error))


def at_window(method, window, action, patch, path):
    """Calls a function in a window of the load, before a method of the exchange."""
    whole = getattr(Exchange, method)

    def changed(self, at):
        if at == range(len(self._traffics))[window]:
            assert len(self._traffics) > 5
            action()
        whole(self, at)

    patch.setattr(Exchange, method, changed)


def fail(kind, *arguments):
    # A new exception, so that no reference remains here.
    raise kind(*arguments)


MEMORY = torch.OutOfMemoryError("no room for it")
# Errors of the failing rank. The other ranks raise a RankError with the same text.
FAULTS = {
    "missing file": ({"paths": "missing.safetensors"}, "FileNotFoundError: .*missing.safetensors"),
    "bad device": ({"device": 1.5}, "TypeError: device must be"),
    "no placements": ({"placements": {}}, "ValueError: placements: no entry matches"),
    "broken placements": ({"placements": broken_placements}, "LookupError: no layout"),
    "truncated file": (truncated_file, "(OSError|SafetensorError): .*a.safetensors"),
    "no memory": (
        partial(failing_call, "fst._ranks.load.torch.empty_like", MEMORY),
        "OutOfMemoryError: no room for it",
    ),
    "no buffers": (partial(failing_call, "fst._ranks.exchange.WindowBuffers", MemoryError()), "MemoryError"),
    "first read": (
        partial(at_window, "_read", 0, partial(fail, ZeroDivisionError, "reading")),
        "ZeroDivisionError: reading",
    ),
    "read": (partial(at_window, "_read", 4, partial(fail, KeyboardInterrupt)), "KeyboardInterrupt"),
    "unpack": (partial(at_window, "_unpack", 3, partial(fail, SystemExit, 3)), "SystemExit: 3"),
    "last unpack": (
        partial(at_window, "_unpack", -1, partial(fail, ArithmeticError, "the last")),
        "ArithmeticError: the last",
    ),
    "interrupt": (partial(at_window, "_read", 2, partial(signal.raise_signal, signal.SIGINT)), "KeyboardInterrupt"),
}
# Arguments and files that differ. All ranks raise such errors. If rank 0 differs, every other rank has another file.
NO_AGREEMENT = "ValueError: the ranks of the group do not agree on"
OTHER_FILE = "(SafetensorError|RankError): .*safetensors: .*(give every rank the same checkpoint|data_offsets)"
DIFFERENCES = {
    "device": ({"device": "meta"}, f"{NO_AGREEMENT} device: .*meta on rank"),
    "dtype": ({"dtype": torch.bfloat16}, f"{NO_AGREEMENT} dtype: .*bfloat16 on rank"),
    "strategy": ({"strategy": "auto"}, f"{NO_AGREEMENT} strategy: .*auto on rank"),
    "window": ({"window_bytes": 8192}, f"{NO_AGREEMENT} window_bytes: .*8192 on rank"),
    "placements": ({"placements": {"*": Replicate()}}, 'ValueError: .*tensor "a": rank . requests .* and rank .'),
    "name": (other_name, OTHER_FILE),
    "length": (other_length, OTHER_FILE),
    "header": (partial(replace_header, b'"F32"', b'"I32"'), OTHER_FILE),
    "bad header": (partial(replace_header, b"data_offsets", b"data_offsetz"), OTHER_FILE),
}


@pytest.mark.parametrize("failing", [0, SIZE - 1])
@pytest.mark.parametrize("name", FAULTS | DIFFERENCES)
def test_fault_of_one_rank(ranks, directories, name, failing):
    fault, expected = (FAULTS | DIFFERENCES)[name]
    raised = ranks(SIZE).run(attempt_and_load, directories, fault, failing)
    for rank, text in enumerate(raised):
        is_told = name in FAULTS and rank != failing
        assert re.match(rf"RankError: rank {failing} failed: (\w+\.)*{expected}" if is_told else expected, text), text


def fail_on_all_but_the_last(directory):
    def place(name, shape):
        if dist.get_rank() < SIZE - 1:
            raise LookupError(f"rank {dist.get_rank()}")
        return Replicate()

    with pytest.raises((LookupError, fst.RankError)) as caught:
        load(directory, placements=place)
    return str(caught.value)


def test_failure_of_several_ranks(ranks, directories):
    assert ranks(SIZE).run(fail_on_all_but_the_last, directories) == [
        "rank 0",
        "rank 1",
        "rank 0 failed, as did 1 more: LookupError: rank 0",
    ]


@on_ranks(SIZE)
def test_failure_releases_memory(directories):
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
            patch.setattr("fst._ranks.exchange.WindowBuffers", Watched)
            patch.setattr("fst._ranks.load.torch.empty_like", empty_like)
            if dist.get_rank() == 1:
                at_window("_read", 4, partial(fail, KeyboardInterrupt), patch, directories)
            try:
                load(directories)
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
            at_window("_read", 2, partial(os._exit, 0), patch, directory)
        with pytest.raises(fst.RankError) as caught:
            load(directory)
    raise caught.value


def test_process_that_ends(ranks, directories):
    """The collective of the other ranks fails, and the error names the window."""
    with pytest.raises(AssertionError) as caught:
        ranks(SIZE).run(lose_a_rank, directories)
    assert "rank 1: ended with exit code 0" in str(caught.value)
    sentence = r"RankError: a rank of the group has ended or does not answer, while the ranks were .* window \d+ of \d+"
    assert re.search(r"rank 0: (.|\n)*" + sentence, str(caught.value))
