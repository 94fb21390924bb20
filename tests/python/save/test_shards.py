"""Sharded saves keep the promises of saves in one file: permissions, links, special files, nothing left behind."""

import contextlib
import json
import os
import signal
import stat
from itertools import cycle
from pathlib import Path

import pytest
import torch

import fst
from forked import run_in_fork
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core import ops
from fst._core.classes import CheckpointSave, LoadPlan

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FILES = {"one file": ["model.safetensors"], "shards": [*SHARDS, INDEX]}
LIMITS = {"one file": 1000, "shards": 100}


def save(directory, value, limit=100):
    """Saves four tensors of 40 bytes, all filled with the value that identifies the checkpoint."""
    tensors = {f"layer.{number}": torch.full((10,), float(value)) for number in range(4)}
    fst.save_file(tensors, directory / "model.safetensors", max_shard_bytes=limit)


def value_in(path):
    [value] = {float(value) for tensor in fst.load_file(path).values() for value in tensor.unique()}
    return value


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def content_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize(("old", "new"), [tuple(FILES), tuple(FILES)[::-1]])
def test_private_checkpoint_stays_private(tmp_path, monkeypatch, old, new):
    """All files are private from their creation on, also those under temporary names."""
    save(tmp_path, 1, LIMITS[old])
    for name in FILES[old]:
        (tmp_path / name).chmod(0o600)
    modes = set()

    def watched(*args, function=ops.save_shard):
        function(*args)
        modes.update(map(mode_of, tmp_path.iterdir()))

    monkeypatch.setattr(ops, "save_shard", watched)
    save(tmp_path, 2, LIMITS[new])
    assert sorted(os.listdir(tmp_path)) == sorted(FILES[new])
    modes.update(map(mode_of, tmp_path.iterdir()))
    assert modes == {0o600}
    assert value_in(tmp_path) == 2


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("one file", "model.safetensors", "shards"),
        ("shards", SHARDS[1], "one file"),
        ("shards", INDEX, "shards"),
    ],
)
def test_files_without_write_permission_are_kept(tmp_path, old, name, new):
    save(tmp_path, 1, LIMITS[old])
    (tmp_path / name).chmod(0o444)
    before = content_of(tmp_path)

    def refuse():
        if os.geteuid() == 0:
            # Permissions do not apply to root.
            tmp_path.chmod(0o777)
            os.seteuid(65534)
        with pytest.raises(PermissionError, match=name):
            save(tmp_path, 2, LIMITS[new])

    with contextlib.ExitStack() as restored:
        if os.geteuid() == 0:
            for path in tmp_path.iterdir():
                os.chown(path, 65534, 65534)
        for parent in tmp_path.parents:
            if parent.stat().st_uid == os.geteuid() and not mode_of(parent) & 0o001:
                restored.callback(parent.chmod, mode_of(parent))
                parent.chmod(mode_of(parent) | 0o011)
        run_in_fork(refuse)
    assert content_of(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_link_of_a_shard_to_another_file_system_is_an_error(tmp_path):
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system")
    save(tmp_path, 1)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(f"/dev/shm/fst-test-{os.getpid()}")
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match=f"{SHARDS[1]}: .*another file system"):
        save(tmp_path, 2)
    assert content_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    list(
        zip(
            ["model.safetensors", *SHARDS, INDEX, "model-00007-of-00009.safetensors"],
            cycle(["fifo", "pipe", "device", "directory"]),
            cycle(LIMITS.values()),
        )
    ),
)
def test_special_files_are_not_replaced(tmp_path, name, kind, limit):
    path = tmp_path / name
    # The link to a pipe of the process itself, such as /dev/stdout in a pipeline, leads to no path.
    pipe = os.pipe()
    links = {"device": "/dev/null", "pipe": f"/proc/self/fd/{pipe[1]}"}
    make = {"fifo": os.mkfifo, "directory": os.mkdir}.get(kind) or (lambda path: path.symlink_to(links[kind]))
    make(path)
    with pytest.raises((ValueError, IsADirectoryError), match=f"{path}: is a "):
        save(tmp_path, 1, limit)
    assert os.listdir(tmp_path) == [name]
    for end in pipe:
        os.close(end)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("owner", "name", "call"), [(ops, "save_shard", 2), (CheckpointSave, "commit", 1)])
def test_interrupt_leaves_one_checkpoint_and_nothing_else(tmp_path, monkeypatch, owner, name, call, moment):
    """Ctrl-C before the index is replaced keeps the old checkpoint. Later, the save ends first."""
    save(tmp_path, 1)
    function = getattr(owner, name)
    calls = []

    def interrupted(*args):
        calls.append(args)
        if moment == "after":
            function(*args)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        if moment == "before":
            function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES["shards"])
    assert value_in(tmp_path) == (2 if (name, moment) == ("commit", "after") else 1)
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) == set(SHARDS)


def test_ranks_do_not_open_two_saves(tmp_path):
    """Names, lengths and headers may be equal. The ids of the saves in the indices differ."""
    save(tmp_path, 1)
    first = OpenCheckpoint(tmp_path)
    headers = first.headers()
    assert OpenCheckpoint(tmp_path, headers).names() == first.names()
    save(tmp_path, 2)
    with pytest.raises(fst.SourceChangedError, match="replaced while the ranks opened it"):
        OpenCheckpoint(tmp_path, headers)
    requests = [torch.zeros(1, dtype=torch.int64)]
    plans = [LoadPlan(each, requests, [0], [-1], "own", 1 << 20) for each in (first, OpenCheckpoint(tmp_path))]
    assert plans[0].digest() != plans[1].digest()
