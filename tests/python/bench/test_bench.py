"""The benchmark program: workloads, digests, goals from prepared results, and a small run."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from fst_bench.bench import Choice
from fst_bench.cell import Cell
from fst_bench.checkpoint import make_checkpoint
from fst_bench.digest import digest
from fst_bench.files import FilesBench
from fst_bench.goal import goals
from fst_bench.machine import machine_facts
from fst_bench.peer import PEERS
from fst_bench.report import markdown, write_report
from fst_bench.result import Run
from fst_bench.run import main
from fst_bench.workload import CAST_DTYPE, RANKS, WORKLOADS
from suite import CHECKOUT

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def run(tmp_path):
    """Function that builds a run from measurements of `dense`, each (peer, state, figures), and from ceilings."""

    def make(measurements, device="cpu", ceilings=()):
        facts = {
            "dense": {"title": "t", "tensors": 4, "bytes": 10**9, "selected": 0, "requested_bytes": {"load": 10**9}}
        }
        results = {
            "command": "fst-bench",
            "commit": "abc",
            "date": "2026-01-01",
            "device": device,
            "machine": machine_facts(tmp_path),
            "load_average_before": 0.0,
            "load_average_after": 0.0,
            "workloads": facts,
            "measurements": [
                {"workload": "dense", "action": "load", "state": state, "peer": peer, "round": number, **figures}
                for number, (peer, state, figures) in enumerate(measurements)
            ],
            "ceilings": [{"name": name, "round": 0, "bytes_per_second": rate, "how": "h"} for name, rate in ceilings],
        }
        path = tmp_path / f"{device}.json"
        path.write_text(json.dumps(results))
        return Run(path)

    return make


def times(load, read=None, **others):
    return {"load_seconds": load, "load_and_read_seconds": read or load, **others}


def verdicts(runs):
    return {goal.text: goal.verdict for part, run in runs.items() for goal in goals(part, run)}


# Workloads and digests.


def test_workloads():
    sizes = {name: WORKLOADS[name](1 << 30).size_bytes for name in ("dense", "moe")}
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
        assert CAST_DTYPE == "F16"
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


# Runs.


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ, monkeypatch):
    """A raw read precedes each cold load, and copies on tmpfs include the configuration of the model."""
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)
    states = {"load": ("cold",), "pretrained": ("tmpfs",), "save": ("disk",)}
    workload = dataclasses.replace(WORKLOADS["dense"](256 * KIB), states=states, slices=())
    checkpoints = {"dense": make_checkpoint(workload, tmp_path)}
    choice = Choice("test", ["fst"], rounds=1, ceilings=["direct-writes"])
    assert FilesBench(choice, checkpoints, tmp_path, tmp_path).run(300)
    results = json.loads((tmp_path / "cpu.json").read_text())
    load, pretrained, save = results["measurements"]
    assert load["tensor_bytes"] == results["workloads"]["dense"]["bytes"]
    assert 0 < load["load_seconds"] <= load["load_and_read_seconds"]
    rate = workload.size_bytes / load["load_and_read_seconds"] / load["raw_bytes_per_second"]
    assert load["share_of_raw_read"] == pytest.approx(rate)
    assert pretrained["load_seconds"] > 0
    assert save["save_seconds"] > 0
    write_report(tmp_path, tmp_path / "report")
    report = (tmp_path / "report" / "BENCHMARKS.md").read_text()
    assert "### dense: from_pretrained of transformers, tmpfs" in report
    assert "| direct-writes | " in report
    assert (tmp_path / "report" / "docs" / "images" / "bench-cpu.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({"digests": ["another"], "load_seconds": 1.0}, "the tensors are not those of the file"),
        ({"unavailable": "it is gone"}, "it is gone"),
    ],
)
def test_wrong_and_missing_tensors_of_fst_fail(measured, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(FilesBench, "_load", lambda self, cell: dict(measured))
    checkpoints = {"many": make_checkpoint(WORKLOADS["many"](64 * KIB), tmp_path)}
    choice = Choice("test", ["fst"], rounds=2, states=["warm"], actions=["load"])
    assert not FilesBench(choice, checkpoints, tmp_path, tmp_path).run(300)
    assert Run(tmp_path / "cpu.json").reason(Cell("many", "load", "warm", "fst")) == expected


def test_measured_processes_write_bytecode(monkeypatch):
    """The time of an import is that of an installed package."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    done = subprocess.run(command, env=PEERS["fst"].environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_order_of_peers(tmp_path, monkeypatch):
    """Each round measures every peer once, in an order of its own."""
    orders = []
    monkeypatch.setattr(FilesBench, "_measure_cell", lambda self, cell, number: orders.append((number, cell.peer)))
    checkpoints = {"many": make_checkpoint(WORKLOADS["many"](64 * KIB), tmp_path / "cache")}
    peers = ["fst", "fst-pread", "safetensors"]
    choice = Choice("test", peers, rounds=8, states=["warm"])
    FilesBench(choice, checkpoints, tmp_path / "out", tmp_path).run(60)
    rounds = [tuple(peer for number, peer in orders if number == round_number) for round_number in range(8)]
    assert all(sorted(order[:3]) == sorted(peers) for order in rounds)
    assert len({order[:3] for order in rounds}) > 1


def test_unknown_peer(monkeypatch, capsys):
    for kind in ([], ["ranks"], ["remote"]):
        monkeypatch.setattr(sys, "argv", ["fst-bench", *kind, "--peers", "fst,nobody"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert "unknown peer 'nobody'" in capsys.readouterr().err


# Reports and goals.


def test_figures_within_each_others_spread_are_equal(run):
    goal = "Warm cache -> CPU, dense, every byte read: ahead of every peer"

    def verdict(own, peer):
        measured = [("fst", "warm", times(0.001, value)) for value in own]
        measured += [("safetensors", "warm", times(0.001, value)) for value in peer]
        return verdicts({"cpu": run(measured)})[goal]

    # The figure is a median, so that one round that differs does not count.
    fast, slow = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 5.0], [1.3, 1.3, 1.4, 1.4, 1.5, 1.5, 0.2]
    assert verdict(fast, slow) == "met"
    assert verdict(slow, fast) == "**missed**"
    assert verdict([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]) == "equal"
    assert verdict([1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]) == "equal"
    assert verdict(fast[:3], slow) == "met, rounds: 3"


def test_goals_of_cold_loads(run):
    """Libraries are compared by shares of a raw read: the disk was slower while the peer loaded."""
    goal = "Cold -> CPU, dense, every byte read: ahead of every peer, as a share of a raw read"
    measured = [("fst", "cold", times(0.001, 0.52, share_of_raw_read=share)) for share in (0.80, 0.81, 0.82)]
    measured += [("safetensors", "cold", times(0.001, 2.0, share_of_raw_read=share)) for share in (0.90, 0.91, 0.92)]
    report = verdicts({"cpu": run(measured, ceilings=[("direct-reads", 2e9)])})
    assert report[goal] == "**missed**, rounds: 3"
    assert report["Cold -> CPU, dense, every byte read: of the rate of direct-reads"] == "met"


def test_goals_of_gpus(run):
    figures = {"beyond_host_bytes": 300 * MIB, "device_scratch_bytes": 64 * MIB}
    measured = [
        ("fst", "tmpfs", times(0.021, second_load_seconds=0.0205, **figures)),
        ("instanttensor", "tmpfs", times(0.0209)),
        ("safetensors", "tmpfs", times(0.2)),
    ]
    report = verdicts({"cuda": run(measured, device="cuda", ceilings=[("pinned-to-device", 50e9)])})
    assert report["tmpfs -> GPU, dense: of the pinned rate"] == "met"
    assert report["tmpfs -> GPU, dense, second load in a process: of the pinned rate"] == "met"
    assert report["tmpfs -> GPU, dense: ahead of every peer"] == "**missed**, rounds: 1"
    assert report["Host memory of a load to the GPU, largest of all"] == "**missed**"
    assert report["Device memory beyond the tensors, largest of all"] == "met"
    assert report["Adapter -> GPU, second load in a process"] == "not measured here: not in this run"


def test_failed_round_has_reason(run):
    failed = {"failed": "the tensors are not those of the file"}
    made = run([("fst", "warm", times(1.0)), ("safetensors", "warm", times(1.0)), ("safetensors", "warm", failed)])
    assert made.figure(Cell("dense", "load", "warm", "safetensors"), "load_seconds") is None
    report = markdown({"cpu": made})
    assert "| safetensors 0.8.0 | - | - |" in report
    assert "- safetensors 0.8.0: the tensors are not those of the file." in report


def test_parts_without_results_stay(run):
    page = (CHECKOUT / "BENCHMARKS.md").read_text()
    assert markdown({}, before=page) == page
    begin, end = (page.index(f"<!-- part: {name} -->\n") for name in ("cpu", "verified"))
    written = markdown({"cpu": run([("fst", "warm", times(1.0))])}, before=page)
    assert written.startswith(page[:begin])
    assert written.endswith(page[end:])
    assert "| fst | 1.00 s [1.00 .. 1.00] |" in written[begin : -len(page[end:])]
