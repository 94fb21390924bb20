"""`fst clean`: temporary files that killed saves have left. tests/rust/checkpoint_save.rs has which files these are."""

import json
import os
from unittest import mock

import torch

import fst
from forked import run_in_fork
from fst._core import ops


def save(directory, value):
    tensors = {name: torch.full((10,), float(value)) for name in "abcd"}
    fst.save_file(tensors, directory / "model.safetensors", max_shard_bytes=80)


def kill_save(directory):
    """Ends a process in its second file, as SIGKILL would."""
    calls = []

    def save_shard(*arguments, function=ops.save_shard):
        calls.append(arguments)
        if len(calls) == 2:
            os._exit(0)
        return function(*arguments)

    with mock.patch.object(ops, "save_shard", save_shard):
        save(directory, 2)


def test_files_of_a_killed_save_are_removed(command, tmp_path):
    save(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))
    run_in_fork(lambda: kill_save(tmp_path))
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
