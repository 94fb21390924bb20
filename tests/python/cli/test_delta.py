"""Deltas on the command line."""

import json

import torch

import fst


def test_make_show_and_apply(command, tmp_path):
    old = {"a": torch.zeros(1000), "b": torch.zeros(10)}
    new = {"a": torch.zeros(1000).index_fill(0, torch.tensor(7), 1.0), "b": torch.zeros(10)}
    fst.save_file(old, tmp_path / "old.safetensors")
    fst.save_file(new, tmp_path / "new.safetensors")
    versions = "--version", "000001", "--base-version", "000000"
    made = command("delta", "make", "old.safetensors", "new.safetensors", "v1", *versions, "--encoding", "overwrite")
    size = fst.load_file(tmp_path / "v1")["a"].nbytes
    assert (made.returncode, made.stdout) == (0, f"v1: 1 tensor changed, {size} B\n")
    shown = command("delta", "show", "v1")
    assert shown.stdout.splitlines()[1].split() == f"v1 000000 000001 overwrite xxh3-128 1 {size} B".split()
    [delta] = json.loads(command("delta", "show", "v1", "--base", "old.safetensors", "--json").stdout)["deltas"]
    assert (delta["encoding"], delta["tensors"], delta["bytes"]) == ("overwrite", 1, size)
    assert delta["share"] == size / 4040
    applied = command("delta", "apply", "old.safetensors", "v1", "full", "--json")
    assert json.loads(applied.stdout) == {"path": "full", "tensors": 2, "bytes": 4040}
    assert torch.equal(fst.load_file(tmp_path / "full")["a"], new["a"])
    # A checkpoint is overwritten on request only.
    refused = command("delta", "apply", "old.safetensors", "v1", "full")
    assert (refused.returncode, refused.stderr.startswith("fst: full: has a checkpoint")) == (1, True)
    assert command("delta", "apply", "old.safetensors", "v1", "full", "--force").returncode == 0


def test_deltas_of_another_base(command, tmp_path):
    tensors = {"a": torch.zeros(4)}
    fst.save_delta(tensors, {"a": torch.ones(4)}, tmp_path / "v1", version="1", base_version="0")
    fst.save_file({"a": torch.full((4,), 2.0)}, tmp_path / "other.safetensors")
    failed = command("delta", "apply", "other.safetensors", "v1", "full")
    assert failed.returncode == 1
    assert 'tensor "a"' in failed.stderr
    assert command("delta", "show", "other.safetensors").returncode == 1
