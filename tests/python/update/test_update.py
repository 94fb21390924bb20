"""`fst.prepare_update`: all or nothing, versions, readiness, transforms and serving threads, in one process."""

import os
import threading
import weakref

import pytest
import torch
from torch import nn

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._update.plan import Staging
from rawfile import assert_all_same
from saved import KEY, damage


def values_of(target):
    return {name: tensor.clone() for name, tensor in target.items()}


class Model(nn.Module):
    """Model with a tied parameter, buffers and an extra state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def newer(tmp_path):
    """A checkpoint of a model with other values, with digests."""
    model = Model()
    fst.save_file(values_of(model.state_dict()), tmp_path / "newer.safetensors", digests="blake3")
    return tmp_path / "newer.safetensors"


def assert_holds(model, path):
    assert_all_same(model.state_dict(), fst.load_file(path))


def test_commit_writes_all_values_in_place(model, newer):
    old = values_of(model.state_dict())
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    update = fst.prepare_update(model, newer, version="7", verify=True)
    assert_all_same(model.state_dict(), old)
    assert (fst.version_of(model), update.ready(), update.ready("layers.1")) == (None, False, False)
    # A tied tensor is staged once.
    assert update.staged_bytes == sum(tensor.nbytes for name, tensor in old.items() if name != "head.weight")
    update.commit()
    assert_holds(model, newer)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses
    assert model.head.weight is model.embedding.weight
    assert (fst.version_of(model), fst.version_of(model.scale.detach()), update.staged_bytes) == ("7", "7", 0)
    assert update.ready("head.weight")
    update.wait("layers.1")


def test_committed_update_keeps_no_staged_memory(model, newer, monkeypatch):
    staged, place = [], Staging.place

    def watched(self, values, target):
        placed = place(self, values, target)
        staged.append(weakref.ref(placed))
        return placed

    monkeypatch.setattr(Staging, "place", watched)
    update = fst.prepare_update(model, newer)
    assert None not in [each() for each in staged]
    update.commit()
    assert {each() for each in staged} == {None}


def test_values_are_cast_to_the_dtype_of_a_module_only(model, newer, tmp_path):
    fst.save_file({"scale": torch.full((3,), 1 / 3)}, tmp_path / "wide.safetensors")
    fst.prepare_update(model, tmp_path / "wide.safetensors", strict=False).commit()
    assert torch.equal(model.scale, torch.full((3,), 1 / 3, dtype=torch.bfloat16))
    with pytest.raises(fst.ModuleMismatchError, match=r"scale.*torch.float32 of shape \[3\] in the checkpoint"):
        fst.prepare_update({"scale": model.scale}, tmp_path / "wide.safetensors")


def rolled_back(model, path):
    fst.prepare_update(model, path).rollback()


def left_open(model, path):
    with fst.prepare_update(model, path):
        pass


def dropped(model, path):
    fst.prepare_update(model, path)


def damaged(model, path):
    damage(path, "scale")
    with pytest.raises(fst.IntegrityError):
        fst.prepare_update(model, path, verify=True)


def misshapen(model, path):
    fst.save_file({**fst.load_file(path), "scale": torch.ones(4, dtype=torch.bfloat16)}, path)
    with pytest.raises(fst.ModuleMismatchError, match="scale"):
        fst.prepare_update(model, path)


def without_memory(model, path):
    with pytest.raises(MemoryError, match="staging_bytes is 20; raise the limit, or pass atomic=False"):
        fst.prepare_update(model, path, staging_bytes=20)


def failed_transform(model, path):
    def transform(name, tensor):
        if name == "scale":
            raise ZeroDivisionError
        return tensor.add_(1)

    with pytest.raises(ZeroDivisionError):
        fst.prepare_update(model, path, transform=transform)


def interrupted(model, path):
    def transform(name, tensor):
        os.kill(os.getpid(), 2)
        return tensor

    with pytest.raises(KeyboardInterrupt):
        fst.prepare_update(model, path, transform=transform)


@pytest.mark.parametrize(
    "end", [rolled_back, left_open, dropped, damaged, misshapen, without_memory, failed_transform, interrupted]
)
def test_nothing_changes_without_a_commit(end, model, newer):
    fst.set_version(model, "6")
    old = values_of(model.state_dict())
    end(model, newer)
    assert_all_same(model.state_dict(), old)
    assert fst.version_of(model) == "6"
    # The tensors can be updated afterwards.
    fst.prepare_update(model, newer, strict=False, transform=lambda name, tensor: None).commit()
    assert fst.version_of(model) is None


def failed_load(model, path):
    """Writes one tensor, and fails at the next one, whose bytes are gone."""
    short = path.with_name("short.safetensors")
    fst.save_file({"scale": fst.load_file(path)["scale"], "zero": torch.zeros(100_000)}, short)
    opened = OpenCheckpoint(short)
    os.truncate(short, short.stat().st_size - 100_000)
    with pytest.raises(OSError, match="short"):
        opened.overwrite(["scale", "zero"], [model.scale.data, torch.empty(100_000)])


def test_failed_load_makes_the_commit_an_error(model, newer):
    """test_update_faults.py has loads and updates in any order."""
    update = fst.prepare_update(model, newer)
    failed_load(model, newer)
    held = values_of(model.state_dict())
    with pytest.raises(fst.VersionError, match="another load or update has written to it"):
        update.commit()
    assert_all_same(model.state_dict(), held)


def test_forked_child_cannot_commit(model, newer):
    update = fst.prepare_update(model, newer)
    child = os.fork()
    if child == 0:
        try:
            update.commit()
        except ValueError as error:
            os._exit("belongs to the process that prepared it" in str(error))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    update.commit()
    assert_holds(model, newer)


def test_failed_update_that_is_not_atomic_marks_the_target(model, newer, tmp_path):
    sources = tmp_path / "damaged.safetensors"
    sources.write_bytes(newer.read_bytes())
    damage(sources, "scale")
    update = fst.prepare_update(model, sources, version="8", verify=True, atomic=False)
    assert update.staged_bytes == 0
    with pytest.raises(fst.IntegrityError):
        update.commit()
    with pytest.raises(fst.VersionError, match="may hold a mixture of two versions"):
        fst.version_of(model)
    with pytest.raises(fst.IntegrityError):
        update.wait("scale")
    fst.load_module(model, newer)
    assert fst.version_of(model) is None
    fst.prepare_update(model, newer, version="8", atomic=False).commit()
    assert_holds(model, newer)
    assert fst.version_of(model) == "8"


@pytest.mark.parametrize("atomic", [True, False])
def test_module_is_ready_before_later_ones(atomic, model, newer):
    """The commit waits in a hook of the module until the test has seen the first layer."""
    update = fst.prepare_update(model, newer, atomic=atomic)
    entered, seen = threading.Event(), threading.Event()

    class Lock:
        def __enter__(self):
            entered.set()
            seen.wait()

        def __exit__(self, *_):
            pass

    update.commit(Lock(), background=True)
    entered.wait()
    assert not update.ready("layers.0")
    seen.set()
    update.wait("layers.0.0")
    assert torch.equal(model.layers[0][0].bias, fst.load_file(newer)["layers.0.0.bias"])
    update.wait()
    assert update.ready()
    with pytest.raises(KeyError, match='no tensor or module "layer"'):
        update.wait("layer")


def test_transform_joins_splits_and_omits_tensors(tmp_path):
    stored = {"q": torch.ones(2, 3), "k": torch.full((2, 3), 2.0), "both": torch.arange(4.0), "unused": torch.zeros(1)}
    fst.save_file(stored, tmp_path / "parts.safetensors")
    target = {"qk": torch.zeros(4, 3, dtype=torch.bfloat16), "low": torch.zeros(2), "high": torch.zeros(2)}
    kept = {}

    def transform(name, tensor):
        kept[name] = tensor
        if {"q", "k"} <= kept.keys() and name in ("q", "k"):
            return {"qk": torch.cat([kept["q"], kept["k"]]).bfloat16()}
        # Views of one tensor.
        return {"low": tensor[:2], "high": tensor[2:]} if name == "both" else None

    update = fst.prepare_update(target, tmp_path / "parts.safetensors", transform=transform)
    # What the transform returned is its own to change.
    kept["both"].zero_()
    update.commit()
    assert torch.equal(target["qk"], torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2).bfloat16())
    assert torch.equal(torch.cat([target["low"], target["high"]]), torch.arange(4.0))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda name, tensor: None, 'no value for "a", "b"'),
        (lambda name, tensor: {"c": tensor}, 'gave a value for "c" when called with "a"'),
        (lambda name, tensor: tensor.double(), r"gave torch.float64 of shape \[2\], but the target is torch.float32"),
    ],
)
def test_transform_that_does_not_fit_is_an_error(transform, message, tmp_path):
    fst.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "ab.safetensors")
    with pytest.raises(ValueError, match=message):
        fst.prepare_update({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "ab.safetensors", transform=transform)


def test_encrypted_checkpoint(model, tmp_path):
    fst.save_file(values_of(Model().state_dict()), tmp_path / "e.safetensors", encryption_key=KEY)
    fst.prepare_update(model, tmp_path / "e.safetensors", encryption_key=KEY).commit()
    assert_all_same(model.state_dict(), fst.load_file(tmp_path / "e.safetensors", encryption_key=KEY))
    with pytest.raises(ValueError, match="the file is encrypted"):
        fst.prepare_update(model, tmp_path / "e.safetensors")


def test_no_request_sees_two_versions(tmp_path):
    """Requests hold a lock while they read, and a commit holds it while it writes."""
    target = {str(index): torch.zeros(300) for index in range(20)}
    lock, seen, done = threading.Lock(), set(), threading.Event()

    def serve():
        while not done.is_set():
            with lock:
                seen.add(tuple(sorted({float(tensor[at]) for tensor in target.values() for at in (0, -1)})))

    server = threading.Thread(target=serve)
    server.start()
    try:
        for version in range(1, 11):
            path = tmp_path / f"{version}.safetensors"
            fst.save_file({name: torch.full_like(tensor, version) for name, tensor in target.items()}, path)
            update = fst.prepare_update(target, path, version=str(version))
            update.commit(lock)
            assert fst.version_of(target) == str(version)
    finally:
        done.set()
        server.join()
    assert all(len(values) == 1 for values in seen)
    assert target["0"][0] == 10


def test_version_belongs_to_memory_and_must_be_one(model):
    fst.set_version(model, "a")
    assert fst.version_of(model.state_dict()) == fst.version_of([model.scale.view(1, 3)]) == "a"
    fst.set_version(model.scale, "b")
    with pytest.raises(fst.VersionError, match=r'tensor "scale" has "b", but tensor "embedding.weight" has "a"'):
        fst.version_of(model)
    assert fst.version_of(torch.ones(3)) is None


@pytest.mark.parametrize(
    ("target", "names", "error", "message"),
    [
        (nn.Linear(2, 2, device="meta"), None, ValueError, "load the first version with load_module"),
        ([torch.ones(2)], ["a", "b"], ValueError, "2 names, but 1 tensors"),
        ({"a": torch.ones(2)}, ["a"], ValueError, "names are for lists"),
        ([1], ["a"], TypeError, "target must hold Tensor only"),
    ],
)
def test_targets_that_cannot_be_updated(target, names, error, message, newer):
    with pytest.raises(error, match=message):
        fst.prepare_update(target, newer, names=names)


def test_operator_runs_in_torchscript(tmp_path):
    fst.save_file({"a": torch.arange(4.0)}, tmp_path / "a.safetensors")

    class Server(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, path: str):
            update = torch.ops.fst.prepare_update([path], ["a"], [self.weight], version="9")
            before = self.weight.sum()
            update.commit()
            return before, self.weight.sum(), torch.ops.fst.version_of([self.weight])

    server = torch.jit.script(Server())
    assert server(str(tmp_path / "a.safetensors")) == (0, 6, "9")
