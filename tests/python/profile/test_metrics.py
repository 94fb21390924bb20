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


def test_counters_grow_with_and_without_a_profile(path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    before = fst.metrics()
    fst.load_file(path)
    with fst.profile(), fst.profile():
        fst.load_file(path)
    with pytest.raises(fst.SafetensorError):
        fst.load_tensors(path, ["missing"])
    fst.save_file({"weight": torch.ones(8)}, path.with_name("saved.safetensors"))
    after = grown(before)
    assert (after["fst.loads"], after["fst.tensors"], after["fst.read.bytes"]) == (2, 4, 2 * 4040)
    assert (after["fst.saves"], after["fst.errors"]) == (1, 1)
    assert after["fst.write.bytes"] >= 32
    now = fst.metrics()
    assert now["fst.stage.bytes"]["read"] - before["fst.stage.bytes"].get("read", 0) == 2 * 4040
    assert 0 < after["fst.seconds"] < 60
    assert now["fst.stage.seconds"]["write"] > before["fst.stage.seconds"].get("write", 0)


def test_forked_child_starts_at_zero(path):
    fst.load_file(path)
    child = os.fork()
    if child == 0:
        os._exit(int(fst.metrics()["fst.loads"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
