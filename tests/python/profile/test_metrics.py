"""`fst.metrics` and the attributes of a profile."""

import os

import pytest
import torch
from safetensors.torch import save_file

import fst


def grown(before):
    """Returns the counters that grew, with the sums over the stages."""
    now = fst.metrics()
    assert now.keys() == before.keys()
    flat = {name: value for name, value in now.items() if not isinstance(value, dict)}
    return {name: value - before[name] for name, value in flat.items() if value > before[name]}


@pytest.fixture
def path(tmp_path):
    save_file({"weight": torch.ones(1000), "bias": torch.ones(10)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_counters_add_up_and_count_overlaps_once(path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    before = fst.metrics()
    fst.load_file(path)
    assert grown(before) == {}
    first = fst.profile()
    with fst.profile() as second:
        fst.load_file(path)
        first.__enter__()
        fst.load_file(path)
    first.__exit__(None, None, None)
    with fst.profile():
        fst.load_file(path)
    after = grown(before)
    assert (after["fst.loads"], after["fst.tensors"], after["fst.read.bytes"]) == (3, 6, 3 * 4040)
    assert after["fst.seconds"] >= second.summary().seconds
    stages = fst.metrics()["fst.stage.bytes"]
    assert stages["read"] - before["fst.stage.bytes"].get("read", 0) == 3 * 4040


def test_attributes_of_a_failed_load(path):
    profile = fst.profile()
    with pytest.raises(fst.SafetensorError), profile:
        fst.load_tensors(path, ["missing"])
    found = profile.to_dict()
    assert found["error.type"].rpartition(".")[2] == "TensorNotFoundError"
    assert found["fst.errors"] == 1
    with fst.profile() as profile:
        fst.load_file(path)
    found = profile.to_dict()
    assert found["file.path"] == os.fspath(path)
    assert "error.type" not in found
    assert all(isinstance(value, (str, int, float)) for value in found.values())
