"""The benchmark of several ranks: a small run, detected faults, goals and layouts."""

import json

import pytest

from fst_bench.bench import Choice
from fst_bench.cell import RANKED, GroupCell, group_key
from fst_bench.checkpoint import make_checkpoint
from fst_bench.goal import goals
from fst_bench.ranks.bench import RanksBench
from fst_bench.ranks.expected import with_groups
from fst_bench.ranks.layout import LAYOUTS, dense, dims
from fst_bench.report import write_report
from fst_bench.result import Run

REPLACEMENT = """
import torch
import torch.distributed as dist
from safetensors.torch import load_file

def load_sharded(paths, placements, *, device, strategy):
    tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    if dist.get_rank() == 1 and strategy == "auto":
        next(iter(tensors.values())).view(torch.uint8)[0, 0] ^= 1
    if dist.get_rank() == 1 and strategy == "exchange":
        raise OSError("this rank has no files")
    return tensors
"""


@pytest.fixture
def bench(tmp_path, python_environ, monkeypatch):
    """Function that benchmarks a small checkpoint. Returns True if all tensors were right, and the run."""
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)

    def run(layouts, states, peers):
        checkpoint = with_groups(make_checkpoint(dense(1 << 20), tmp_path / "cache"), layouts, [2])
        choice = Choice("test", peers, rounds=1, states=states, layouts=layouts, ranks=[2])
        right = RanksBench(choice, {RANKED: checkpoint}, tmp_path / "out", tmp_path).run(120)
        return right, Run(tmp_path / "out" / "ranks.json")

    return run


@pytest.mark.benchmark
def test_small_run(bench, tmp_path):
    right, run = bench(["columns"], ["warm"], ["fst", "fst-exchange", "fst-blake3-exchange"])
    assert right
    assert run.figure(GroupCell("columns", 2, "warm", "fst-blake3-exchange"), "load_seconds")
    [facts] = run.workloads.values()
    needed = facts["needed_bytes"][group_key("columns", 2)]
    links = {peer: run.figure(GroupCell("columns", 2, "warm", peer), "link_bytes") for peer in run.peers()}
    assert links["fst-exchange"].median >= needed > 0
    load, read = (
        run.figure(GroupCell("columns", 2, "warm", "fst"), key) for key in ("load_seconds", "load_and_read_seconds")
    )
    assert 0 < load.median <= read.median
    assert run.ceiling("broadcasts, 2 ranks").median > 0
    write_report(tmp_path / "out", tmp_path / "report")
    report = (tmp_path / "report" / "BENCHMARKS.md").read_text()
    assert "### 2 ranks: matrices cut by columns, warm page cache" in report
    assert "Warm cache -> CPU, rows on 2 ranks, exchange: at least as fast as fastsafetensors" in report


@pytest.mark.benchmark
def test_wrong_and_missing_tensors_fail(bench, tmp_path, monkeypatch):
    """A replacement of fst that changes a byte or raises on one rank is detected."""
    replacement = tmp_path / "replacement"
    replacement.mkdir()
    (replacement / "fst.py").write_text(REPLACEMENT)
    monkeypatch.setattr("fst_bench.peer.own_directory", lambda: [replacement])
    right, run = bench(["replicated"], ["warm"], ["fst", "fst-exchange"])
    assert not right
    reasons = {peer: run.reason(GroupCell("replicated", 2, "warm", peer)) for peer in run.peers()}
    assert reasons == {
        "fst": "the tensors are not those of the files",
        "fst-exchange": "OSError: this rank has no files",
    }


def test_goals_of_ranks(tmp_path):
    cell = {"layout": "rows", "ranks": 2, "state": "cold", "round": 0}
    figures = {"load_seconds": 1.0, "storage_bytes": 100, "link_bytes": 51}
    measurements = [
        cell | figures | {"peer": "fst", "load_and_read_seconds": 2.0},
        cell | figures | {"peer": "fst-exchange", "load_and_read_seconds": 3.0, "link_bytes": 60},
        cell | figures | {"peer": "fastsafetensors", "load_and_read_seconds": 4.0},
        cell | figures | {"peer": "fastsafetensors-buffered", "load_and_read_seconds": 2.5},
    ]
    facts = {"bytes": 100, "needed_bytes": {group_key("rows", 2): 50}}
    results = {"device": "cpu", "workloads": {"ranks": facts}, "measurements": measurements, "ceilings": []}
    (tmp_path / "ranks.json").write_text(json.dumps(results))
    verdicts = {goal.text: goal.verdict for goal in goals("ranks", Run(tmp_path / "ranks.json"))}
    compared = "at least as fast as fastsafetensors"
    assert verdicts[f"Cold -> CPU, rows on 2 ranks: {compared}"] == "met, rounds: 1"
    assert verdicts[f"Cold -> CPU, rows on 2 ranks, exchange: {compared}"] == "**missed**, rounds: 1"
    assert verdicts["Ranks that exchange, rows, cold: bytes read over those of the checkpoint"] == "met"
    assert verdicts["Ranks that exchange, rows, cold: bytes sent over those needed"] == "**missed**"
    assert verdicts["Ranks that exchange, columns, cold: bytes read over those of the checkpoint"].startswith("not")


def test_vectors_are_whole_in_every_layout():
    workload = dense(1 << 20)
    for layout in LAYOUTS:
        cut = dims(workload, layout)
        assert all(cut[tensor.name] is None for tensor in workload.tensors if len(tensor.shape) == 1)
        assert all(cut[tensor.name] is None or tensor.shape[cut[tensor.name]] % 4 == 0 for tensor in workload.tensors)
