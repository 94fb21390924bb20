"""The benchmark of several ranks: a small run, goals and layouts."""

import json

import pytest

from fst_bench.bench import Choice
from fst_bench.cell import RANKED, GroupCell, group_key
from fst_bench.checkpoint import make_checkpoint
from fst_bench.goal import goals
from fst_bench.ranks.bench import Host, RanksBench
from fst_bench.ranks.expected import with_groups
from fst_bench.ranks.layout import dense
from fst_bench.report import write_report
from fst_bench.result import Run


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ, monkeypatch):
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)
    peer = "fst-blake3-exchange"
    cell = GroupCell("columns", 2, "warm", peer)
    checkpoint = with_groups(make_checkpoint(dense(1 << 20), tmp_path), ["columns"], [2])
    choice = Choice("test", [peer], rounds=1, states=["warm"], layouts=["columns"], ranks=[2])
    assert RanksBench(choice, {RANKED: checkpoint}, tmp_path, tmp_path).run(120)
    run = Run(tmp_path / "ranks.json")
    [facts] = run.workloads.values()
    needed = facts["needed_bytes"][group_key("columns", 2)]
    assert run.figure(cell, "link_bytes").median >= needed > 0
    load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
    assert 0 < load.median <= read.median
    write_report(tmp_path, tmp_path / "report")
    report = (tmp_path / "report" / "BENCHMARKS.md").read_text()
    assert "### 2 ranks: matrices cut by columns, warm page cache" in report
    assert "Warm cache -> CPU, rows on 2 ranks, exchange: at least as fast as fastsafetensors" in report


def test_rank_that_failed_first_is_reported(monkeypatch):
    monkeypatch.setattr(Host, "__init__", lambda self: None)
    answers = [{"failed": "a timeout", "at": 2.0}, {"failed": "OSError: no files", "at": 1.0}]
    monkeypatch.setattr(Host, "_ask", lambda self, task: answers)
    assert Host().load(GroupCell("rows", 2, "warm", "fst"), dense(1 << 20), [], "warm") == {
        "failed": "OSError: no files"
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
