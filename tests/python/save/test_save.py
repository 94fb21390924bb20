"""`fst.save_file` and `fst.save_file_async`: contents, shards, failed saves and background saves."""

import functools
import itertools
import json
import os
import sys
import threading
import weakref

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst
from forked import run_in_fork
from fst._save.aliasing import have_bytes_in_common
from rawfile import DTYPES, assert_all_same, assert_same, random_raw
from suite import DEVICES

CASES = st.lists(
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 9)), max_size=8
)


def tensors_of(cases):
    """Returns tensors of the given dtypes and shapes, with unsorted names."""
    tensors = {}
    for number, (dtype, shape, seed) in enumerate(cases):
        # An element of F4 holds two numbers.
        shape = (*shape, 2) if dtype == "F4" else tuple(shape)
        tensors[f"{seed}.{dtype}.{number}"] = random_raw(dtype, shape, seed).tensor()
    return tensors


def checkpoint_of(value, count=4):
    """Returns tensors of 40 bytes, all filled with the value that identifies the checkpoint."""
    return {f"layer.{number}": torch.full((10,), float(value)) for number in range(count)}


# Saves to one file, and errors.


def save_in_background(*args, **kwargs):
    """Saves in the background and raises the error of the call or of the future."""
    fst.save_file_async(*args, **kwargs).result()


SHARED = torch.zeros(4)
# core/test_mistakes.py has other mistakes.
INVALID = {
    "lazy": ({"a": torch.nn.LazyLinear(2).weight}, {}, ValueError, 'tensor "a": it has no shape yet; call'),
    "a view": (
        {"kept": torch.ones(1), "a": SHARED, "b": SHARED[1:2]},
        {},
        ValueError,
        r'^[^"]*share memory: "a", "b"\.[^"]*$',
    ),
    "two groups": (
        {"a": SHARED[:2], "b": SHARED[1:3], "c": (other := torch.ones(3)), "d": other},
        {},
        ValueError,
        'memory: "a", "b"; "c", "d"\\.',
    ),
    "metadata of CryptoTensors": ({}, {"metadata": {"__encryption__": "{}"}}, ValueError, "CryptoTensors"),
    "metadata that is no mapping": ({}, {"metadata": ["a"]}, TypeError, "metadata must be a mapping"),
    "metadata that is not UTF-8": ({}, {"metadata": {"a": "\ud800"}}, ValueError, "UTF-8"),
    "a limit that is a truth": ({}, {"max_shard_bytes": True}, TypeError, "must be an int"),
}


def test_invalid_arguments(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")
    for tensors, arguments, error, message in INVALID.values():
        for save in (fst.save_file, save_in_background):
            with pytest.raises(error, match=message):
                save(tensors, path, **arguments)
    assert os.listdir(tmp_path) == ["m.safetensors"]
    assert path.read_bytes() == b"old"


def test_disjoint_views_of_one_tensor(tmp_path):
    """Their extents may overlap, as the extents of columns, as long as no byte is in two tensors."""
    whole = torch.arange(24.0).reshape(4, 6)
    parts = torch.view_as_real(torch.randn(3, dtype=torch.complex64))
    for tensors in (
        {"q": whole[0], "k": whole[1]},
        {"q": whole[:, :2], "k": whole[:, 2:4], "v": whole[:, 4:]},
        {"q": whole[::2, ::2], "k": whole[1::2, 1::2], "v": whole[::2, 1::4]},
        {"q": parts[:, 0], "k": parts[:, 1]},
    ):
        fst.save_file(tensors, tmp_path / "m.safetensors")
        assert_all_same(fst.load_file(tmp_path / "m.safetensors"), tensors)
    # The third tensor shares bytes with the first one only, whose extent contains the second's.
    with pytest.raises(ValueError, match='share memory: "a", "c"'):
        fst.save_file({"a": whole[:, ::3], "b": whole[1, 1:3], "c": whole[2:, :1]}, tmp_path / "m.safetensors")


_DIMS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)
_VIEWS = st.tuples(st.sampled_from([torch.uint8, torch.int16, torch.int32]), _DIMS, st.integers(0, 12))


@given(_VIEWS, _VIEWS)
def test_bytes_in_common(one, two):
    base = torch.zeros(400, dtype=torch.uint8)
    views, found = [], []
    for dtype, dims, first in (one, two):
        views.append(base.view(dtype).as_strided([size for size, _ in dims], [step for _, step in dims], first))
        positions = {first}
        for size, step in dims:
            positions = {each + index * step for each in positions for index in range(size)}
        found.append({each * dtype.itemsize + byte for each in positions for byte in range(dtype.itemsize)})
    assert have_bytes_in_common(*views) == bool(found[0] & found[1])


# Shards.


@given(cases=CASES, limit=st.integers(1, 2000))
@settings(max_examples=50)
def test_shards_hold_each_tensor_once(tmp_path_factory, cases, limit):
    directory = tmp_path_factory.mktemp("sharded")
    path = directory / "ema.fp32.safetensors"
    index_path = directory / "ema.fp32.safetensors.index.json"
    tensors = tensors_of(cases)
    fst.save_file(tensors, path, {"format": "pt"}, max_shard_bytes=limit)
    assert_all_same(fst.load_file(directory), tensors)

    total = sum(tensor.nbytes for tensor in tensors.values())
    if not index_path.exists():
        assert total <= limit or len(tensors) == 1
        assert os.listdir(directory) == [path.name]
        return
    index = json.loads(index_path.read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"ema.fp32-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert sorted(os.listdir(directory)) == [*files, index_path.name]
    assert index["metadata"].keys() == {"total_size", "fst.save"}
    assert index["metadata"]["total_size"] == total
    assert list(index["weight_map"]) == list(tensors)

    shards = {file: safetensors.torch.load_file(directory / file) for file in files}
    assert_all_same({name: shards[file][name] for name, file in index["weight_map"].items()}, tensors)
    assert sum(len(shard) for shard in shards.values()) == len(tensors)
    # Shards keep the order of the tensors, and each is full: the next tensor would exceed the limit.
    assert [index["weight_map"][name] for name in tensors] == sorted(index["weight_map"].values())
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards.values()]
    assert all(size <= limit or len(shard) == 1 for size, shard in zip(sizes, shards.values(), strict=True))
    firsts = [next(name for name in tensors if index["weight_map"][name] == file) for file in files[1:]]
    assert all(size + tensors[first].nbytes > limit for size, first in zip(sizes[:-1], firsts, strict=True))
    assert all(fst.metadata(directory / file) == {"format": "pt"} for file in files)


def test_other_files_are_kept(tmp_path):
    others = [
        "config.json",
        "model-1-of-2.safetensors",
        "modelx-00001-of-00002.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "model.fp16-00001-of-00002.safetensors",
        "model.safetensors.index.json.bak",
        "other.safetensors",
    ]
    for name in others:
        (tmp_path / name).write_text("x")
    (tmp_path / "model-00001-of-00009.safetensors").write_text("stale")
    fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=100)
    fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=1000)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "model.safetensors"])


def test_save_without_limit_writes_one_file(tmp_path):
    fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=100)
    before = sorted(os.listdir(tmp_path))
    fst.save_file(checkpoint_of(2), tmp_path / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "model.safetensors"])
    assert_all_same(fst.load_file(tmp_path), checkpoint_of(1))


# Interrupted saves.


def load_as_transformers(directory):
    """Loads as transformers does: one file if it exists, otherwise the files of the index."""
    if (directory / "model.safetensors").exists():
        return safetensors.torch.load_file(directory / "model.safetensors")
    files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: safetensors.torch.load_file(directory / file)[name] for name, file in files.items()}


class RaiseAt:
    """Trace function that raises an exception at a line of the package, as a signal handler may."""

    def __init__(self, line, error):
        self.lines_left, self.error = line, error

    def __call__(self, frame, event, argument):
        is_fst = frame.f_code.co_filename.startswith(os.path.dirname(fst.__file__))
        return self.trace if is_fst else None

    def trace(self, frame, event, argument):
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                raise self.error
        return self.trace


def raises_at(line, error, save):
    """Raises an error at a line of a save. Returns False if the save has fewer lines."""
    before = sys.gettrace()
    sys.settrace(RaiseAt(line, error))
    try:
        save()
    except type(error):
        return True
    finally:
        sys.settrace(before)
    return False


def held_locks():
    with open("/proc/locks") as locks:
        return [lock for lock in locks if lock.split()[4] == str(os.getpid())]


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("old_limit", "new_limit"), [(100, 100), (1000, 50), (50, 1000)])
def test_exception_at_any_line_leaves_one_checkpoint(tmp_path, old_limit, new_limit):
    """Exceptions of signal handlers come between any two bytecodes. `TimeoutError` is an `OSError`."""
    old, new = checkpoint_of(1), checkpoint_of(2)
    errors = [TimeoutError("alarm"), SystemExit(0), MemoryError()]
    for line in itertools.count(1, 2):
        directory = tmp_path / str(line)
        directory.mkdir()
        path = directory / "model.safetensors"
        fst.save_file(old, path, max_shard_bytes=old_limit)
        before = open_files()
        if not raises_at(
            line, errors[line % 3], functools.partial(fst.save_file, new, path, max_shard_bytes=new_limit)
        ):
            break
        assert (open_files(), held_locks()) == (before, [])
        for load in (fst.load_file, load_as_transformers):
            loaded = load(directory)
            assert_all_same(loaded, old if loaded["layer.0"][0] == 1 else new)
        assert not [name for name in os.listdir(directory) if not name.endswith((".safetensors", ".json"))]
    assert line > 100


# Background saves.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 3000])
def test_background_save_copies_values(tmp_path, device, limit):
    tensors = {name: tensor.to(device) for name, tensor in tensors_of((d, [3, 5], 1) for d in DTYPES).items()}
    tensors["large"] = torch.randn(1 << 20, device=device)
    tensors["transposed"] = torch.randn(3, 5, device=device).T
    expected = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    saved = fst.save_file_async(tensors, tmp_path / "m.safetensors", {"step": "1"}, limit)
    for tensor in tensors.values():
        # `zero_` does not support all dtypes.
        tensor.untyped_storage().fill_(0)
    tensors.clear()
    assert saved.result() is None
    assert_all_same(fst.load_file(tmp_path if limit else tmp_path / "m.safetensors"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("memory_of_other", [False, True])
def test_background_save_is_ordered_with_streams(tmp_path, side, memory_of_other):
    """A save has the values at the call, although the memory is then overwritten or reused on its stream."""
    current = torch.cuda.Stream() if side else torch.cuda.current_stream()
    other = torch.cuda.Stream() if memory_of_other else current
    with torch.cuda.stream(other):
        weight = torch.zeros(1 << 24, device="cuda")
    with torch.cuda.stream(current):
        current.wait_stream(other)
        torch.cuda._sleep(100_000_000)
        weight.fill_(3)
        saved = fst.save_file_async({"weight": weight}, tmp_path / "m.safetensors")
        if not memory_of_other:
            weight.fill_(4)
        del weight
    with torch.cuda.stream(other):
        torch.full((1 << 24,), 5.0, device="cuda")
    saved.result()
    assert_same(fst.load_file(tmp_path / "m.safetensors")["weight"], torch.full((1 << 24,), 3.0))


@pytest.fixture
def blocked_save(monkeypatch):
    """Blocks all saves until an event is set, and records their steps."""
    release = threading.Event()
    steps = []
    write, host_copy = fst._save.save._write_shard, fst._save.save.HostCopy

    def blocked_write(*args):
        release.wait()
        write(*args)
        steps.append("written")

    def recorded_copy(tensors):
        steps.append("copied")
        return host_copy(tensors)

    monkeypatch.setattr(fst._save.save, "_write_shard", blocked_write)
    monkeypatch.setattr(fst._save.save, "HostCopy", recorded_copy)
    yield release, steps
    release.set()


def test_background_saves_run_one_at_a_time(tmp_path, blocked_save):
    release, steps = blocked_save
    first = fst.save_file_async(checkpoint_of(1), tmp_path / "m.safetensors")
    second = threading.Thread(target=fst.save_file_async, args=(checkpoint_of(2), tmp_path / "m.safetensors"))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert not first.done()
    assert steps == ["copied"]
    release.set()
    second.join()
    fst.save_file_async({}, tmp_path / "other.safetensors").result()
    assert steps == ["copied", "written"] * 3
    assert_all_same(fst.load_file(tmp_path / "m.safetensors"), checkpoint_of(2))


def test_background_save_resolves_path_at_call(tmp_path, monkeypatch, blocked_save):
    monkeypatch.chdir(tmp_path)
    saved = fst.save_file_async(checkpoint_of(1), "m.safetensors")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    blocked_save[0].set()
    saved.result()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "m.safetensors"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_background_save_error_is_in_future(tmp_path, monkeypatch):
    copies = []

    def watched(tensors, *args):
        copies.extend(weakref.ref(tensor) for tensor in tensors.values())
        return write(tensors, *args)

    write = fst._save.save._write_shard
    monkeypatch.setattr(fst._save.save, "_write_shard", watched)
    failed = fst.save_file_async(checkpoint_of(1), tmp_path / "nowhere" / "m.safetensors")
    error = failed.exception()
    assert isinstance(error, FileNotFoundError)
    # The future keeps the error and not the copies.
    fst.save_file_async(checkpoint_of(2), tmp_path / "m.safetensors").result()
    assert [copy() for copy in copies[:4]] == [None] * 4
    assert_all_same(fst.load_file(tmp_path / "m.safetensors"), checkpoint_of(2))


def test_background_save_finishes_before_exit(run_python, tmp_path):
    program = """
import sys, torch, fst
fst.save_file_async({"a": torch.arange(10_000_000)}, sys.argv[1])
"""
    run_python(program, str(tmp_path / "m.safetensors"))
    assert_same(fst.load_file(tmp_path / "m.safetensors")["a"], torch.arange(10_000_000))


def test_forked_child_saves_in_background(tmp_path, blocked_save):
    release, _ = blocked_save
    saved = fst.save_file_async(checkpoint_of(1), tmp_path / "parent.safetensors")

    def save():
        release.set()
        fst.save_file_async(checkpoint_of(2), tmp_path / "child.safetensors").result()

    run_in_fork(save)
    assert not saved.done()
    release.set()
    saved.result()
    assert_all_same(fst.load_file(tmp_path / "parent.safetensors"), checkpoint_of(1))
    assert_all_same(fst.load_file(tmp_path / "child.safetensors"), checkpoint_of(2))
