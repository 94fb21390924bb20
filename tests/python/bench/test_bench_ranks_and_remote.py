"""The benchmarks of several ranks and of remote checkpoints: small runs, and goals."""

import json
import shutil

import pytest

from fst_bench.bench import Choice
from fst_bench.cell import RANKED, Cell, GroupCell, group_key
from fst_bench.checkpoint import make_checkpoint
from fst_bench.goal import goals
from fst_bench.ranks.bench import Host, RanksBench
from fst_bench.ranks.expected import with_groups
from fst_bench.ranks.layout import dense
from fst_bench.remote.bench import RemoteBench
from fst_bench.report import write_report
from fst_bench.result import Run
from fst_bench.workload import WORKLOADS


@pytest.fixture
def fst_environ(python_environ, monkeypatch):
    """Sets variables with which child processes import this fst."""
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)


def verdicts(part, tmp_path, **results):
    (tmp_path / "results.json").write_text(json.dumps({"device": "cpu", "ceilings": []} | results))
    return {goal.text: goal.verdict for goal in goals(part, Run(tmp_path / "results.json"))}


@pytest.mark.benchmark
@pytest.mark.usefixtures("fst_environ")
def test_small_run_of_ranks(tmp_path):
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
    found = verdicts("ranks", tmp_path, workloads={"ranks": facts}, measurements=measurements)
    compared = "at least as fast as fastsafetensors"
    assert found[f"Cold -> CPU, rows on 2 ranks: {compared}"] == "met, rounds: 1"
    assert found[f"Cold -> CPU, rows on 2 ranks, exchange: {compared}"] == "**missed**, rounds: 1"
    assert found["Ranks that exchange, rows, cold: bytes read over those of the checkpoint"] == "met"
    assert found["Ranks that exchange, rows, cold: bytes sent over those needed"] == "**missed**"
    assert found["Ranks that exchange, columns, cold: bytes read over those of the checkpoint"].startswith("not")


@pytest.mark.benchmark
@pytest.mark.usefixtures("fst_environ")
def test_small_run_of_services(tmp_path, monkeypatch):
    installed = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "weed" else installed(name, **options))
    checkpoints = {"adapter": make_checkpoint(WORKLOADS["adapter"](0), tmp_path)}
    checkpoints[RANKED] = with_groups(make_checkpoint(dense(1 << 20), tmp_path), ["rows"], [2])
    services = ["http", "s3", "far"]
    choice = Choice("test", ["fst"], rounds=1, services=services, layouts=["rows"], ranks=[2])
    assert RemoteBench(choice, checkpoints, tmp_path, tmp_path).run(120)
    run = Run(tmp_path / "remote.json")
    assert "weed is not installed" in run.facts["services"]["s3"]["unavailable"]
    for service in ("http", "far"):
        assert run.ceiling(service).median > 0
        cell = Cell("adapter", "load", service, "fst")
        load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
        assert 0 < load.median <= read.median
        assert run.figure(cell, "sent_bytes").median >= run.workloads["adapter"]["bytes"]
    assert 0 < run.figure(Cell("adapter", "load", "far", "fst"), "share_of_streams").median <= 1
    assert run.figure(GroupCell("rows", 2, "http", "fst"), "share_of_object").median >= 1
    write_report(tmp_path, tmp_path / "report")
    report = (tmp_path / "report" / "BENCHMARKS.md").read_text()
    for text in ("### adapter: Far HTTP", "### fst.load_sharded: HTTP", "weed is not installed"):
        assert text in report


def test_goals_of_remote_loads(tmp_path):
    def entry(workload, service, peer, **figures):
        times = {"load_seconds": 1.0, "load_and_read_seconds": 1.0, "cpu_seconds_per_gb": 1.0, "round": 0}
        return {"workload": workload, "action": "load", "state": service, "peer": peer} | times | figures

    measurements = [
        entry("dense", "http", "fst", beyond_host_bytes=300 << 20),
        entry("dense", "http", "fst-into", load_seconds=2.0),
        entry("dense", "http", "obstore", load_and_read_seconds=2.0, cpu_seconds_per_gb=0.5),
        entry("dense", "far", "fst", share_of_streams=0.95),
        entry("adapter", "far", "fst", load_seconds=0.1, streams_seconds=0.0125),
        {"layout": "rows", "ranks": 2, "state": "http", "peer": "fst", "round": 0, "share_of_object": 1.004},
        {"layout": "rows", "ranks": 4, "state": "http", "peer": "fst", "round": 0, "share_of_object": 1.2},
    ]
    ceilings = [{"name": "http", "round": 0, "bytes_per_second": 1e9}]
    facts = {"dense": {"bytes": 10**9}, "adapter": {"bytes": 10**7}}
    found = verdicts("remote", tmp_path, workloads=facts, measurements=measurements, ceilings=ceilings)
    assert found["HTTP -> CPU, dense, new tensors: of the rate of the server, drained"] == "met"
    assert found["HTTP -> CPU, dense, existing tensors: of the rate of the server, drained"] == "**missed**"
    assert found["HTTP -> CPU, dense, every byte read: ahead of every peer"] == "met, rounds: 1"
    assert found["HTTP -> CPU, dense: CPU time of 1 GB, the least of all"] == "**missed**, rounds: 1"
    assert found["Remote -> CPU: host memory beyond the tensors, largest of all"] == "**missed**"
    assert found["Far HTTP -> CPU, dense: of the rates of its connections"] == "met"
    assert found["Far HTTP -> CPU, adapter: 4 round trips, and its bytes over its connections"] == "**missed**"
    assert found["HTTP -> CPU, rows on up to 4 ranks: bytes sent over those of the files"] == "**missed**"
    assert found["S3 -> CPU, dense, new tensors: of the rate of the server, drained"].startswith("not measured")
