"""Workloads, their files, and digests of results."""

import pytest
import torch
from safetensors.torch import load_file

from fst_bench.checkpoint import make_checkpoint
from fst_bench.digest import digest
from fst_bench.workload import RANKS, WORKLOADS

KIB, MIB = 1 << 10, 1 << 20


def test_workloads():
    sizes = {name: WORKLOADS[name](1 << 30).size_bytes for name in ("dense", "moe", "ranks")}
    assert sizes == pytest.approx(dict.fromkeys(sizes, 1 << 30), rel=0.25)
    assert len({tensor.name for tensor in WORKLOADS["moe"](64 * MIB).tensors}) == 18_867
    sharded, adapter = WORKLOADS["sharded"](64 * MIB), WORKLOADS["adapter"](0)
    assert (len(sharded.files), len(sharded.tensors), len(adapter.tensors)) == (30, 723, 500)
    assert adapter.size_bytes == pytest.approx(10**7, rel=0.05)


@pytest.mark.parametrize("name", ["dense", "many"])
def test_digests_match_files(name, tmp_path):
    workload = WORKLOADS[name](256 * KIB)
    made = make_checkpoint(workload, tmp_path)
    tensors = {name: tensor for path in made.paths for name, tensor in load_file(path).items()}
    assert len(tensors) == len(workload.tensors)
    assert made.digests.get("load") == digest(tensors)
    if workload.selected:
        assert made.digests["select"] == digest({name: tensors[name] for name in workload.selected})
    if workload.slices:
        cuts = {cut.name: tensors[cut.name].narrow(cut.dim, cut.start, cut.length) for cut in workload.slices}
        assert {cut.dim for cut in workload.slices} == {0, 1}
        assert sum(cut.nbytes for cut in cuts.values()) < sum(t.nbytes for t in tensors.values()) / (RANKS - 2)
        assert made.digests["slice"] == digest(cuts)
        assert made.digests["cast"] == digest({name: tensor.half() for name, tensor in tensors.items()})
    assert make_checkpoint(workload, tmp_path) == made


def test_digest_detects_changes():
    right = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, 3)}
    wrong = [
        {"a": right["a"]},
        {"a": right["b"], "b": right["a"]},
        {"a": right["a"].reshape(3, 2), "b": right["b"]},
        {"a": right["a"], "b": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": right["a"], "b": torch.tensor([[0.0, 0, 0], [0, 0, 1e-45]])},
    ]
    assert digest(dict(reversed(right.items()))) == digest(right)
    assert len({digest(right), *map(digest, wrong)}) == 1 + len(wrong)
