"""The commands `fst ls`, `fst cat` and `fst diff`."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst._checkpoint import batched

OLD = {
    "bias": torch.tensor([float("nan"), 0.0]),
    "cast": torch.zeros(2),
    "gone": torch.zeros(1),
    "weight": torch.arange(24.0).view(4, 6),
}


@pytest.fixture
def old(tmp_path):
    save_file(OLD, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors"


def test_diff_finds_each_kind_of_difference(command, old, tmp_path, monkeypatch):
    weight = OLD["weight"].clone()
    weight[1, 5] = weight[3, 0] = -1
    # Zeros of both signs are equal numbers, and other bits.
    new = {"bias": torch.tensor([float("nan"), -0.0]), "cast": torch.zeros(2).half(), "weight": weight}
    save_file({**new, "added": torch.zeros(2, 3)}, tmp_path / "new.safetensors")
    # Several parts of a tensor are compared.
    monkeypatch.setattr(batched, "BATCH_BYTES", 20)
    done = command("diff", old, tmp_path / "new.safetensors", "--json")
    assert done.returncode == 1
    found = {item.pop("name"): tuple(item.values()) for item in json.loads(done.stdout)["differences"]}
    assert found == {
        "bias": ("values", "1 element", "from [1]"),
        "cast": ("dtype", "F32", "F16"),
        "gone": ("removed", "F32 [1]", ""),
        "weight": ("values", "2 elements", "from [1, 5]"),
        "added": ("added", "", "F32 [2, 3]"),
    }
    assert command("diff", old, old).stdout == "0 of 4 tensors differ\n"
    assert command("diff", old, tmp_path / "new.safetensors", "--headers", "--names", "weight").returncode == 0


def test_cat_prints_values_and_bytes(command, old):
    assert command("cat", old, "weight", "--slice=-1, ::4").stdout == "F32 [2]\ntensor([18., 22.])\n"
    raw = command("cat", old, "weight", "--raw", "--slice=0:2, 2").stdout
    assert struct.unpack("<2f", raw.encode()) == (2.0, 8.0)
    assert "is not an index" in command("cat", old, "weight", "--slice=x").stderr
    done = command("cat", old, "weigth")
    assert done.returncode == 1
    assert '"weight"' in done.stderr


def test_ls_lists_files(command, tmp_path):
    fst.save_file(OLD, tmp_path / "model.safetensors", max_shard_bytes=100)
    listed = json.loads(command("ls", tmp_path, "--json").stdout)["files"]
    assert sum(file["tensors"] for file in listed) == 4
    assert sum(file["bytes"] for file in listed) == 116
    assert len(listed) > 1
    assert [file["path"] for file in listed] == [
        line.split()[-1] for line in command("ls", tmp_path).stdout.splitlines()
    ]
