"""`fst clean`: temporary files that killed saves have left."""

import json
import os
from unittest import mock

import pytest
import torch

import fst
from forked import run_in_fork
from fst._core import ops
from fst._core.classes import CheckpointSave


def save(directory, value):
    tensors = {name: torch.full((10,), float(value)) for name in "abcd"}
    fst.save_file(tensors, directory / "model.safetensors", max_shard_bytes=80)


def end_in(name, call):
    """Ends this process in a call of an operator, as SIGKILL would."""
    calls = []
    function = getattr(ops, name)

    def ending(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            os._exit(0)
        return function(*arguments)

    return mock.patch.object(ops, name, ending)


def kill_save(directory, name, call):
    def run():
        with end_in(name, call):
            save(directory, 2)

    run_in_fork(run)


def test_files_of_a_killed_save_are_removed(command, tmp_path):
    save(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))
    kill_save(tmp_path, "save_shard", 2)
    assert len(os.listdir(tmp_path)) == len(before) + 2
    removed = json.loads(command("clean", "--json", tmp_path).stdout)["removed"]
    assert {os.path.basename(file["path"]).split(".")[0] for file in removed} == {"", "model-00001-of-00002"}
    assert sum(file["bytes"] for file in removed) > 80
    assert sorted(os.listdir(tmp_path)) == before
    assert fst.load_file(tmp_path)["a"][0] == 1
    assert command("clean", f"file://{tmp_path}").stdout == "0 files removed, 0 B\n"
    refused = command("clean", "s3://user:secret@b/k/")
    assert refused.returncode == 2
    assert "s3://b/k/: give local directories" in refused.stderr


def kill_between_indices(directory):
    """Saves, and ends before the first file is linked to its final name, which a directory has."""
    final = directory / "model-00001-of-00002.safetensors"

    def commit(*arguments, function=CheckpointSave.commit):
        final.unlink()
        final.mkdir()
        try:
            function(*arguments)
        finally:
            os._exit(0)

    def run():
        with mock.patch.object(CheckpointSave, "commit", commit):
            save(directory, 2)

    run_in_fork(run)
    final.rmdir()


@pytest.mark.parametrize("is_followed", [False, True])
def test_files_that_the_index_names_stay(command, tmp_path, is_followed):
    """A save that ends between its two indices leaves a checkpoint of temporary names. The next save removes it."""
    save(tmp_path, 1)
    kill_between_indices(tmp_path)
    if is_followed:
        # By a save that is killed after it has looked for files of killed saves.
        kill_save(tmp_path, "save_shard", 2)
    command("clean", tmp_path)
    assert fst.load_file(tmp_path)["a"][0] == 2
    save(tmp_path, 3)
    assert len(os.listdir(tmp_path)) == 3


def test_files_of_a_running_save_stay(command, tmp_path, monkeypatch):
    """Neither the command nor another save removes them."""
    save(tmp_path, 1)

    def interfere():
        assert command("clean", tmp_path).stdout == "0 files removed, 0 B\n"

    def save_shard(*arguments, function=ops.save_shard):
        function(*arguments)
        interfere()

    monkeypatch.setattr(ops, "save_shard", save_shard)
    save(tmp_path, 2)
    assert fst.load_file(tmp_path)["a"][0] == 2


def test_directory_must_exist(command, tmp_path):
    done = command("clean", tmp_path / "nothing")
    message = f"fst: {tmp_path / 'nothing'}: cannot list: No such file or directory (os error 2)\n"
    assert (done.returncode, done.stderr) == (1, message)
