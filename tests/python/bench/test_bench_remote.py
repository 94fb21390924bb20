"""The benchmark of remote checkpoints: a small run, goals, and the server's ceiling."""

import json
import shutil

import pytest

from fst_bench.bench import Choice
from fst_bench.cell import RANKED, Cell, GroupCell
from fst_bench.checkpoint import make_checkpoint
from fst_bench.goal import goals
from fst_bench.http_server import Server
from fst_bench.ranks.expected import with_groups
from fst_bench.ranks.layout import dense
from fst_bench.remote.bench import RemoteBench
from fst_bench.remote.drain import drain
from fst_bench.report import write_report
from fst_bench.result import Run
from fst_bench.workload import WORKLOADS


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ, monkeypatch):
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)
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
        entry("dense", "http", "obstore", load_and_read_seconds=2.0, cpu_seconds_per_gb=0.5),
        entry("dense", "far", "fst", share_of_streams=0.95),
        entry("adapter", "far", "fst", load_seconds=0.1, streams_seconds=0.0125),
        {"layout": "rows", "ranks": 2, "state": "http", "peer": "fst", "round": 0, "share_of_object": 1.004},
        {"layout": "rows", "ranks": 4, "state": "http", "peer": "fst", "round": 0, "share_of_object": 1.2},
    ]
    ceilings = [{"name": "http", "round": 0, "bytes_per_second": 1e9}]
    facts = {"dense": {"bytes": 10**9}, "adapter": {"bytes": 10**7}}
    results = {"device": "cpu", "workloads": facts, "measurements": measurements, "ceilings": ceilings}
    (tmp_path / "remote.json").write_text(json.dumps(results))
    verdicts = {goal.text: goal.verdict for goal in goals("remote", Run(tmp_path / "remote.json"))}
    assert verdicts["HTTP -> CPU, dense: of the rate of the server, drained"] == "met"
    assert verdicts["HTTP -> CPU, dense, every byte read: ahead of every peer"] == "met, rounds: 1"
    assert verdicts["HTTP -> CPU, dense: CPU time of 1 GB, the least of all"] == "**missed**, rounds: 1"
    assert verdicts["Remote -> CPU: host memory beyond the tensors, largest of all"] == "**missed**"
    assert verdicts["Far HTTP -> CPU, dense: of the rates of its connections"] == "met"
    assert verdicts["Far HTTP -> CPU, adapter: 4 round trips, and its bytes over its connections"] == "**missed**"
    assert verdicts["HTTP -> CPU, rows on up to 4 ranks: bytes sent over those of the files"] == "**missed**"
    assert verdicts["S3 -> CPU, dense: of the rate of the server, drained"].startswith("not measured")


def test_drain_receives_every_byte():
    with Server({"m": bytes(1_000_003)}) as server:
        assert drain(server.url("m"), 1_000_003, 3) > 0
        assert server.counts().sent_bytes == 1_000_003
        assert server.counts().connections == 3
