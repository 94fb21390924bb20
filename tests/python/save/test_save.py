"""`fst.save_file` and `fst.save_file_async`: contents, shards, failed saves and background saves."""

import errno
import json
import os
import signal
import stat
import threading
import time
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst
from fst._core import ops
from rawfile import DTYPES, assert_same, random_raw

CASES = st.lists(
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 9)), max_size=8
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors_of(cases):
    """Returns tensors of the given dtypes and shapes, with unsorted names."""
    tensors = {}
    for number, (dtype, shape, seed) in enumerate(cases):
        # An element of F4 holds two numbers.
        shape = (*shape, 2) if dtype == "F4" else tuple(shape)
        tensors[f"{seed}.{dtype}.{number}"] = random_raw(dtype, shape, seed).tensor()
    return tensors


def assert_all_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(actual[name], tensor)


def checkpoint_of(value, count=4):
    """Returns tensors of 40 bytes, all filled with the value that identifies the checkpoint."""
    return {f"layer.{number}": torch.full((10,), float(value)) for number in range(count)}


# Saves to one file, and errors.


@given(cases=CASES, metadata=st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), st.text('a\n"é😀')))
@settings(max_examples=50)
def test_round_trip(tmp_path, cases, metadata):
    tensors = tensors_of(cases)
    path = tmp_path / "m.safetensors"
    fst.save_file(tensors, path, metadata)
    assert_all_same(fst.load_file(path), tensors)
    assert_all_same(safetensors.torch.load_file(path), tensors)
    assert fst.metadata(path) == (metadata or {})


def test_mapping_subclass_and_str_path(tmp_path):
    class Layers(dict):
        pass

    fst.save_file(Layers(a=torch.ones(2)), str(tmp_path / "any.name"))
    assert_all_same(fst.load_file(tmp_path / "any.name"), {"a": torch.ones(2)})


def test_overwrite_loaded_file(tmp_path):
    path = tmp_path / "m.safetensors"
    fst.save_file(checkpoint_of(1), path)
    loaded = fst.load_file(path)
    loaded["layer.0"] += 1
    expected = {name: tensor.clone() for name, tensor in loaded.items()}
    fst.save_file(loaded, path)
    assert_all_same(loaded, expected)
    assert_all_same(fst.load_file(path), expected)


def save_in_background(*args, **kwargs):
    """Saves in the background and raises the error of the call or of the future."""
    fst.save_file_async(*args, **kwargs).result()


SHARED = torch.zeros(4)
INVALID = {
    "no mapping": ([torch.ones(1)], {}, TypeError, "tensors must be a mapping .* not list"),
    "a name that is no str": ({1: torch.ones(1)}, {}, TypeError, "str only, not int"),
    "no tensor": ({"a": [1.0]}, {}, TypeError, 'tensor "a": expected a torch.Tensor, not list'),
    "sparse": ({"a": torch.ones(2).to_sparse()}, {}, ValueError, 'tensor "a": .*sparse.*dense'),
    "meta": ({"a": torch.ones(2, device="meta")}, {}, ValueError, 'tensor "a": .*meta'),
    "the same tensor twice": ({"b": SHARED, "a": SHARED}, {}, ValueError, 'share memory: "a", "b"'),
    "names that do not share": (
        {"kept": torch.ones(1), "tied": SHARED, "head": SHARED},
        {},
        ValueError,
        r'^[^"]*share memory: "head", "tied"\.[^"]*$',
    ),
    "a view": ({"a": SHARED, "b": SHARED[1:2], "c": torch.ones(1)}, {}, ValueError, 'memory: "a", "b"\\.'),
    "two groups": (
        {"a": SHARED[:2], "b": SHARED[1:3], "c": (other := torch.ones(3)), "d": other},
        {},
        ValueError,
        'memory: "a", "b"; "c", "d"\\.',
    ),
    "a reserved name": ({"__metadata__": torch.ones(1)}, {}, ValueError, "__metadata__"),
    "metadata of CryptoTensors": ({}, {"metadata": {"__encryption__": "{}"}}, ValueError, "CryptoTensors"),
    "a name that is not UTF-8": ({"\ud800": torch.ones(1)}, {}, ValueError, "UTF-8"),
    "a dtype of PyTorch alone": ({"a": torch.ones(1, dtype=torch.complex128)}, {}, NotImplementedError, '"a"'),
    "metadata that is no mapping": ({}, {"metadata": ["a"]}, TypeError, "metadata must be a mapping"),
    "metadata that is no text": ({}, {"metadata": {"step": 3}}, TypeError, "'step' to 3"),
    "metadata that is not UTF-8": ({}, {"metadata": {"a": "\ud800"}}, ValueError, "UTF-8"),
    "a limit in words": ({}, {"max_shard_bytes": "5GB"}, TypeError, "must be an int.*'5GB'"),
    "a limit that is a truth": ({}, {"max_shard_bytes": True}, TypeError, "must be an int"),
    "a limit of nothing": ({}, {"max_shard_bytes": 0}, ValueError, "positive"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments(tmp_path, case):
    tensors, arguments, error, message = INVALID[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")
    for save in (fst.save_file, save_in_background):
        with pytest.raises(error, match=message):
            save(tensors, path, **arguments)
    assert os.listdir(tmp_path) == ["m.safetensors"]
    assert path.read_bytes() == b"old"


def test_disjoint_views_of_one_tensor(tmp_path):
    rows = torch.arange(6.0).reshape(2, 3)
    fst.save_file({"q": rows[0], "k": rows[1]}, tmp_path / "m.safetensors")
    assert_all_same(fst.load_file(tmp_path / "m.safetensors"), {"q": rows[0], "k": rows[1]})


def test_invalid_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fst.save_file({"a": torch.ones(1)}, tmp_path / "nowhere" / "m.safetensors")
    with pytest.raises(IsADirectoryError):
        fst.save_file({"a": torch.ones(1)}, tmp_path)
    with pytest.raises(TypeError, match="path"):
        fst.save_file({"a": torch.ones(1)}, 3)
    with pytest.raises(ValueError, match=r"m\.bin.*\.safetensors"):
        fst.save_file({"a": torch.ones(1)}, tmp_path / "m.bin", max_shard_bytes=10)
    assert os.listdir(tmp_path) == []


# Shards.


@given(cases=CASES, limit=st.integers(1, 2000))
@settings(max_examples=50)
def test_shards_hold_each_tensor_once(tmp_path_factory, cases, limit):
    directory = tmp_path_factory.mktemp("sharded")
    tensors = tensors_of(cases)
    fst.save_file(tensors, directory / "model.safetensors", {"format": "pt"}, max_shard_bytes=limit)
    assert_all_same(fst.load_file(directory), tensors)

    total = sum(tensor.nbytes for tensor in tensors.values())
    if not (directory / "model.safetensors.index.json").exists():
        assert total <= limit or len(tensors) == 1
        assert os.listdir(directory) == ["model.safetensors"]
        return
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert sorted(os.listdir(directory)) == [*files, "model.safetensors.index.json"]
    assert index["metadata"] == {"total_size": total}
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


def test_shard_names(tmp_path):
    fst.save_file(checkpoint_of(1), tmp_path / "ema.fp32.safetensors", max_shard_bytes=100)
    assert sorted(os.listdir(tmp_path)) == [
        "ema.fp32-00001-of-00002.safetensors",
        "ema.fp32-00002-of-00002.safetensors",
        "ema.fp32.safetensors.index.json",
    ]
    assert_all_same(fst.load_file(tmp_path / "ema.fp32.safetensors.index.json"), checkpoint_of(1))


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


def fail_directory_fsync(monkeypatch, code):
    """Makes os.fsync fail for directories."""
    flush = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


def test_shards_without_directory_fsync(tmp_path, monkeypatch):
    fail_directory_fsync(monkeypatch, errno.EINVAL)
    fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=100)
    assert_all_same(fst.load_file(tmp_path), checkpoint_of(1))


def test_error_after_the_rename_says_that_the_checkpoint_is_there(tmp_path, monkeypatch):
    fail_directory_fsync(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=r"complete and in place, but a power failure .*Input/output error.*") as failed:
        fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=100)
    assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(tmp_path))
    assert_all_same(fst.load_file(tmp_path), checkpoint_of(1))


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


class Ended(BaseException):
    """Raised in the middle of a save."""


def end_at(step, end, monkeypatch):
    """Calls `end` before a step that changes the directory, given its number. Returns the list of steps taken."""
    taken = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            taken.append(name)
            if len(taken) == step:
                end()
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((ops, "save_shard"), (ops, "write_bytes"), (ops, "link_file"), (os, "fsync"), (Path, "unlink")):
        watch(owner, name)
    return taken


@pytest.mark.parametrize(
    ("old_limit", "new_limit", "kind"),
    [(100, 100, "exit"), (50, 100, "exception"), (1000, 50, "exit"), (1000, 50, "exception"), (100, 1000, "exception")],
)
def test_interrupted_save_leaves_one_checkpoint(tmp_path, monkeypatch, old_limit, new_limit, kind):
    old, new = checkpoint_of(1), checkpoint_of(2)
    ended = 0
    while True:
        directory = tmp_path / str(ended)
        directory.mkdir()
        path = directory / "model.safetensors"
        fst.save_file(old, path, max_shard_bytes=old_limit)
        if not _save_ends(new, path, new_limit, ended + 1, kind, monkeypatch):
            break
        ended += 1
        for load in (fst.load_file, load_as_transformers):
            loaded = load(directory)
            assert_all_same(loaded, old if loaded["layer.0"][0] == 1 else new)
        # The next save succeeds and removes leftover files.
        fst.save_file(checkpoint_of(3), path, max_shard_bytes=100)
        assert_all_same(fst.load_file(directory), checkpoint_of(3))
        assert len(os.listdir(directory)) == 3
    assert ended >= 5


def _save_ends(tensors, path, limit, step, kind, monkeypatch):
    """Ends a save before a step. Returns False if the save has fewer steps."""
    if kind == "exit":
        child = os.fork()
        if child == 0:
            end_at(step, lambda: os._exit(7), monkeypatch)
            fst.save_file(tensors, path, max_shard_bytes=limit)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 7)
        return code == 7

    def end():
        raise Ended

    with monkeypatch.context() as patch:
        taken = end_at(step, end, patch)
        try:
            fst.save_file(tensors, path, max_shard_bytes=limit)
        except Ended:
            return True
    assert len(taken) < step
    return False


def test_failed_save_keeps_old_checkpoint(tmp_path, monkeypatch):
    fst.save_file(checkpoint_of(1), tmp_path / "model.safetensors", max_shard_bytes=100)
    before = sorted(os.listdir(tmp_path))

    def full():
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        taken = end_at(2, full, patch)
        with pytest.raises(OSError, match="No space left"):
            fst.save_file(checkpoint_of(2), tmp_path / "model.safetensors", max_shard_bytes=50)
    assert taken[:2] == ["save_shard", "save_shard"]
    assert sorted(os.listdir(tmp_path)) == before
    assert_all_same(fst.load_file(tmp_path), checkpoint_of(1))


SAVE_IN_LOOP = """
import sys, torch, fst
print("ready", flush=True)
value = 0
while True:
    value += 1
    tensors = {f"layer.{number}": torch.full((250_000,), float(value)) for number in range(8)}
    fst.save_file(tensors, sys.argv[1], max_shard_bytes=(2 + value % 2) * 1_000_000)
"""


def test_killed_process_leaves_one_checkpoint(tmp_path, start_python):
    index = tmp_path / "model.safetensors.index.json"
    for wait in (0.0, 0.03, 0.07):
        process = start_python(SAVE_IN_LOOP, str(tmp_path / "model.safetensors"))
        process.readline()
        while not index.exists():
            assert process.poll() is None
        time.sleep(wait)
        process.kill()
        loaded = fst.load_file(tmp_path)
        assert len(loaded) == 8
        assert len({float(value) for tensor in loaded.values() for value in tensor.unique()}) == 1


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
def test_background_save_is_ordered_with_current_stream(tmp_path):
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(side):
            weight = torch.zeros(1 << 24, device="cuda")
            torch.cuda._sleep(100_000_000)
            weight.fill_(3)
            saved = fst.save_file_async({"weight": weight}, tmp_path / "m.safetensors")
            weight.fill_(4)
            del weight
            # Reuses the memory that was just freed.
            torch.full((1 << 24,), 5.0, device="cuda")
        saved.result()
        assert_same(fst.load_file(tmp_path / "m.safetensors")["weight"], torch.full((1 << 24,), 3.0))


@pytest.mark.gpu
def test_background_save_from_memory_of_other_stream(tmp_path):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        weight = torch.full((1 << 24,), 3.0, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(100_000_000)
    saved = fst.save_file_async({"weight": weight}, tmp_path / "m.safetensors")
    del weight
    with torch.cuda.stream(side):
        torch.full((1 << 24,), 5.0, device="cuda")
    saved.result()
    assert_same(fst.load_file(tmp_path / "m.safetensors")["weight"], torch.full((1 << 24,), 3.0))


def test_background_saves_keep_call_order(tmp_path):
    ended = []
    saves = [fst.save_file_async(checkpoint_of(value), tmp_path / "m.safetensors") for value in range(20)]
    for number, saved in enumerate(saves):
        saved.add_done_callback(lambda _, number=number: ended.append(number))
    saves[-1].result()
    assert all(saved.done() for saved in saves)
    assert sorted(ended) == list(range(20))
    assert_all_same(fst.load_file(tmp_path / "m.safetensors"), checkpoint_of(19))


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
    child = os.fork()
    if child == 0:
        release.set()
        code = 1
        try:
            signal.alarm(60)
            fst.save_file_async(checkpoint_of(2), tmp_path / "child.safetensors").result()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not saved.done()
    release.set()
    saved.result()
    assert_all_same(fst.load_file(tmp_path / "parent.safetensors"), checkpoint_of(1))
    assert_all_same(fst.load_file(tmp_path / "child.safetensors"), checkpoint_of(2))
