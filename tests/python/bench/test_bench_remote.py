"""The benchmark of remote checkpoints: a small run, detected faults, goals, and the server's ceiling."""

import json

import pytest

from fst_bench.bench import Choice
from fst_bench.cell import RANKED, Cell, GroupCell
from fst_bench.checkpoint import make_checkpoint
from fst_bench.digest import digest
from fst_bench.goal import goals
from fst_bench.http_server import Fault, Server
from fst_bench.loaders.views import tensor_views
from fst_bench.ranks.expected import with_groups
from fst_bench.ranks.layout import dense
from fst_bench.remote.bench import RemoteBench
from fst_bench.remote.drain import drain
from fst_bench.report import write_report
from fst_bench.result import Run
from fst_bench.workload import WORKLOADS

REPLACEMENT = """
import torch
from safetensors.torch import load
from urllib.request import urlopen

library = torch.library.Library("fst", "DEF")
library.define("reader(str[] paths, str device) -> str")
library.impl("reader", lambda paths, device: "replacement", "CompositeExplicitAutograd")

def load_files(urls, device):
    tensors = {name: tensor for url in urls for name, tensor in load(urlopen(url).read()).items()}
    tensors[min(tensors)].view(-1).view(torch.uint8)[0] ^= 1
    return tensors
"""


@pytest.fixture
def bench(tmp_path, python_environ, monkeypatch):
    """Function that benchmarks small checkpoints. Returns True if all tensors were right, and the run."""
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def run(services, peers, sizes):
        cache = tmp_path / "cache"
        checkpoints = {"dense": make_checkpoint(WORKLOADS["dense"](1 << 20), cache)}
        checkpoints[RANKED] = with_groups(make_checkpoint(dense(1 << 20), cache), ["rows"], sizes)
        choice = Choice("test", peers, rounds=1, services=services, layouts=["rows"], ranks=sizes)
        right = RemoteBench(choice, checkpoints, tmp_path / "out", cache).run(120)
        return right, Run(tmp_path / "out" / "remote.json")

    return run


@pytest.mark.benchmark
def test_small_run(bench, tmp_path):
    right, run = bench(["http", "far"], ["fst", "fst-hub"], [2])
    assert right
    for service in ("http", "far"):
        assert run.ceiling(service).median > 0
        for peer in ("fst", "fst-hub"):
            cell = Cell("dense", "load", service, peer)
            load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
            assert 0 < load.median <= read.median
            assert run.figure(cell, "sent_bytes").median >= run.workloads["dense"]["bytes"]
    assert 0 < run.figure(Cell("dense", "load", "far", "fst"), "share_of_streams").median <= 1
    assert run.figure(GroupCell("rows", 2, "http", "fst"), "share_of_object").median >= 1
    write_report(tmp_path / "out", tmp_path / "report")
    report = (tmp_path / "report" / "BENCHMARKS.md").read_text()
    assert "### dense: Far HTTP" in report
    assert "### fst.load_sharded: HTTP" in report
    assert "HTTP -> CPU, dense: of the rate of the server, drained" in report


@pytest.mark.benchmark
def test_missing_server_is_reported(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("fst_bench.servers.program.shutil.which", lambda *_, **__: None)
    right, run = bench(["http", "s3"], ["fst"], [])
    assert right
    assert "weed is not installed" in run.facts["services"]["s3"]["unavailable"]
    assert "fst_bench.http_server" in run.facts["services"]["http"]["how"]
    write_report(tmp_path / "out", tmp_path / "report")
    assert "weed is not installed" in (tmp_path / "report" / "BENCHMARKS.md").read_text()


@pytest.mark.benchmark
def test_wrong_tensors_fail(bench, tmp_path, monkeypatch):
    """A replacement of fst that changes a byte is detected."""
    replacement = tmp_path / "replacement"
    replacement.mkdir()
    (replacement / "fst.py").write_text(REPLACEMENT)
    monkeypatch.setattr("fst_bench.peer.own_directory", lambda: [replacement])
    right, run = bench(["http"], ["fst"], [])
    assert not right
    assert run.reason(Cell("dense", "load", "http", "fst")) == "the tensors are not those of the file"


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


def test_drain_refuses_a_server_without_ranges():
    with Server({"m": bytes(100)}) as server:
        server.fault("m", Fault("ignore-range", times=9))
        with pytest.raises(RuntimeError, match="200"):
            drain(server.url("m"), 100, 2)


def test_views_match_the_file(tmp_path):
    checkpoint = make_checkpoint(WORKLOADS["adapter"](0), tmp_path)
    [path] = checkpoint.paths
    assert digest(tensor_views(bytearray(path.read_bytes()))) == checkpoint.digests["load"]
