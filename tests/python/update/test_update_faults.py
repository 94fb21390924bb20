"""Faults of updates of live weights: processes that end, Ctrl-C, locks that fail, and updates in any order."""

import os
import random
import resource
import signal
import time

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn

import fst
from rawfile import assert_all_same

SIZES = {"first": 400_000, "second": 50_000, "third": 3}


def tensors_of(value):
    """Returns tensors of the checkpoint with this value."""
    return {name: torch.full((size,), float(value)) for name, size in SIZES.items()}


def shared(directory, name, size, dtype=torch.float32):
    """Returns a tensor in a file, whose contents outlive the process."""
    return torch.from_file(str(directory / name), shared=True, size=size, dtype=dtype)


PROGRAM = """
import signal, sys
from pathlib import Path
from test_update_faults import SIZES, shared
import fst, torch

directory = Path(sys.argv[1])
target = {name: shared(directory, name, size) for name, size in SIZES.items()}
stage = shared(directory, "stage", 1, torch.uint8)
# The default action of SIGALRM ends the process at once.
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
update = fst.prepare_update(target, directory / "new.safetensors")
stage[0] = 1
update.commit()
stage[0] = 2
signal.pause()
"""


def test_process_that_ends_at_any_moment(tmp_path, start_python):
    """Before the commit, no byte of the target has changed. After it, all have. The source never does."""
    fst.save_file(tensors_of(2), tmp_path / "new.safetensors")
    stored = (tmp_path / "new.safetensors").read_bytes()
    begin = time.perf_counter()
    fst.prepare_update(tensors_of(1), tmp_path / "new.safetensors").commit()
    seconds = min(0.05, time.perf_counter() - begin)
    files = {"new.safetensors", "stage", *SIZES}
    for _ in range(20):
        stage = shared(tmp_path, "stage", 1, torch.uint8).zero_()
        target = {name: shared(tmp_path, name, size).fill_(1) for name, size in SIZES.items()}
        program = start_python(PROGRAM, str(tmp_path), str(random.uniform(1e-6, 2 * seconds)))
        assert program.wait() == -signal.SIGALRM, program.errors
        possible = [{1.0}, {1.0, 2.0}, {2.0}][stage]
        assert {value for tensor in target.values() for value in tensor.unique().tolist()} <= possible
        assert (tmp_path / "new.safetensors").read_bytes() == stored
        assert {path.name for path in tmp_path.iterdir()} == files


RANK = """
import signal, sys
from datetime import timedelta
from pathlib import Path
from test_update_faults import tensors_of
import fst, torch
import torch.distributed as dist

directory, rank, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def join(name, size):
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/{name}", rank=rank if size > 1 else 0, world_size=size,
        timeout=timedelta(seconds=60),
    )
    return dist.group.WORLD


group, target = join(f"store-{delay}", 2), tensors_of(1)
fst.set_version(target, "1")
try:
    # The other rank may end before this one leaves the barrier.
    dist.barrier()
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, delay)
    while True:
        fst.prepare_update(target, directory / "new.safetensors", version="2", group=group).commit()
except Exception as error:
    print(type(error).__name__)
values = {value for tensor in target.values() for value in tensor.unique().tolist()}
try:
    version = fst.version_of(target)
except fst.VersionError:
    version = "2"  # This rank has written, and the other one may not have.
assert values == {float(version)}, (values, version)
dist.destroy_process_group()
fst.prepare_update(target, directory / "new.safetensors", version="3", group=join(f"alone-{delay}", 1)).commit()
assert fst.version_of(target) == "3"
print("updated again")
"""


def test_rank_that_ends_at_any_moment(tmp_path, start_python):
    """The other rank raises an error, has whole weights of one version, and can update in a new group."""
    fst.save_file(tensors_of(2), tmp_path / "new.safetensors")
    for _ in range(5):
        delay = random.uniform(1e-6, 0.05)
        ranks = [start_python(RANK, str(tmp_path), str(rank), str(delay)) for rank in range(2)]
        assert ranks[1].wait() == -signal.SIGALRM, ranks[1].errors
        assert ranks[0].succeed().endswith("Error\nupdated again\n")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in tensors_of(1).items():
            self.register_buffer(name, tensor)


@pytest.fixture
def model():
    model = Model()
    fst.set_version(model, "1")
    return model


@pytest.fixture
def update(model, tmp_path):
    fst.save_file(tensors_of(2), tmp_path / "new.safetensors")
    return fst.prepare_update(model, tmp_path / "new.safetensors", version="2")


def assert_holds(model, version):
    assert {value for tensor in model.buffers() for value in tensor.unique().tolist()} == {float(version)}
    assert fst.version_of(model) == version


class Lock:
    """Lock whose entry or exit calls a function."""

    def __init__(self, at, action):
        self.at, self.action = at, action

    def __enter__(self):
        if self.at == "entry":
            self.action()

    def __exit__(self, *_):
        if self.at == "exit":
            self.action()


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize(("action", "error"), [(interrupt, KeyboardInterrupt), (fail, ZeroDivisionError)])
def test_lock_that_fails(action, error, model, update):
    """Before the writes, the old version stays, and the update can be committed. After them, the new one does."""
    with pytest.raises(error):
        update.commit(Lock("entry", action))
    assert_holds(model, "1")
    with pytest.raises(error):
        update.commit(Lock("exit", action))
    assert_holds(model, "2")
    update.wait()
    with pytest.raises(ValueError, match="the update is committed"):
        update.commit()


def test_interrupt_during_a_commit_is_deferred(model, update):
    model.register_load_state_dict_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        update.commit()
    assert_holds(model, "2")
    assert update.ready()


def test_full_disk_leaves_no_delta(model, tmp_path):
    """A limit on file sizes fails like a full disk. It is between the sizes of the two files of the delta."""
    new = {"third": torch.ones(3), "second": torch.randn(SIZES["second"]), "first": torch.randn(SIZES["first"])}
    versions = {"version": "2", "base_version": "1", "max_shard_bytes": 1 << 20}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fst.save_delta(tensors_of(1), new, tmp_path / "delta", **versions)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(IsADirectoryError):
        fst.prepare_update(model, tmp_path / "delta")
    assert_holds(model, "1")
    fst.save_delta(tensors_of(1), new, tmp_path / "delta", **versions)
    fst.prepare_update(model, tmp_path / "delta").commit()
    assert_all_same(dict(model.named_buffers()), new)


@settings(max_examples=40, stateful_step_count=20)
class AnyOrder(RuleBasedStateMachine):
    """Updates and loads of parts of one target in any order, compared with plain assignments."""

    @initialize()
    def begin(self):
        self.target = tensors_of(0)
        self.values = dict.fromkeys(SIZES, 0)
        self.versions = dict.fromkeys(SIZES)
        self.writes = dict.fromkeys(SIZES, 0)
        self.updates = []

    def part(self, names):
        return {name: self.target[name] for name in names}

    def write(self, names, value, version):
        for name in names:
            self.values[name], self.versions[name] = value, version
            self.writes[name] += 1

    @rule(names=st.sets(st.sampled_from(list(SIZES)), min_size=1), value=st.integers(1, 3), atomic=st.booleans())
    def prepare(self, names, value, atomic):
        part = self.part(sorted(names))
        update = fst.prepare_update(
            list(part.values()), checkpoint(value), names=list(part), version=str(value), atomic=atomic
        )
        self.updates.append([update, list(part), value, {name: self.writes[name] for name in part}, True])

    @precondition(lambda self: self.updates)
    @rule(number=st.integers(0, 100))
    def commit(self, number):
        entry = self.updates[number % len(self.updates)]
        update, names, value, writes, is_open = entry
        if not is_open:
            with pytest.raises(ValueError, match="prepare another"):
                update.commit()
        elif any(self.writes[name] != count for name, count in writes.items()):
            with pytest.raises(fst.VersionError):
                update.commit()
        else:
            update.commit()
            self.write(names, value, str(value))
            entry[-1] = False
        self.check()

    @precondition(lambda self: self.updates)
    @rule(number=st.integers(0, 100))
    def roll_back(self, number):
        entry = self.updates[number % len(self.updates)]
        entry[0].rollback()
        entry[-1] = False
        self.check()

    @rule(name=st.sampled_from(list(SIZES)), value=st.integers(1, 3))
    def load_into(self, name, value):
        fst.load_into(checkpoint(value), [name], [self.target[name]])
        self.write([name], value, None)
        self.check()

    def check(self):
        for name, tensor in self.target.items():
            assert tensor.unique().tolist() == [self.values[name]]
            assert fst.version_of(tensor) == self.versions[name]


def checkpoint(value):
    return AnyOrder.directory / f"{value}.safetensors"


def test_any_order(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "first", 5)
    monkeypatch.setitem(SIZES, "second", 2)
    monkeypatch.setattr(AnyOrder, "directory", tmp_path, raising=False)
    for value in range(1, 4):
        fst.save_file(tensors_of(value), checkpoint(value))
    run_state_machine_as_test(AnyOrder)
