"""Figures, goals and tables of BENCHMARKS.md from prepared results."""

import pytest

from fst_bench.machine import machine_facts
from fst_bench.registry import PARTS
from fst_bench.report import markdown
from fst_bench.result import Run
from suite import CHECKOUT

MIB = 1 << 20
NOT_MEASURED = "not measured here: not in this run"


def made_run(folder, entries, device="cpu", ceilings=(), **facts):
    """Returns a run with these measurements, each with the fields of its name and figures, and with ceilings."""
    workload = {
        "title": "t",
        "tensors": 4,
        "files": 1,
        "bytes": 10**9,
        "selected": 0,
        "requested_bytes": {"load": 10**9},
    }
    return Run(
        {
            "command": "fst-bench",
            "commit": "abc",
            "date": "2026-01-01",
            "device": device,
            "machine": machine_facts(folder),
            "load_average_before": 0.0,
            "workloads": {"dense": workload, "adapter": {"bytes": 10**7}},
            "measurements": [entry | {"round": number} for number, entry in enumerate(entries)],
            "ceilings": [{"name": name, "round": 0, "bytes_per_second": rate, "how": "h"} for name, rate in ceilings],
            **facts,
        }
    )


def load(peer, state, seconds=1.0, workload="dense", **figures):
    times = {"load_seconds": seconds, "load_and_read_seconds": seconds, "cpu_seconds_per_gb": 1.0}
    return {"workload": workload, "action": "load", "state": state, "peer": peer} | times | figures


def verdicts(part, run):
    return {goal.text: goal.verdict for goal in PARTS[part].goals(run)}


def test_figures_within_each_others_spread_are_equal(tmp_path):
    def verdict(own, peer):
        rounds = (("fst", own), ("safetensors", peer))
        entries = [load(name, "warm", value) for name, values in rounds for value in values]
        found = verdicts("cpu", made_run(tmp_path, entries))
        return found["Warm cache -> CPU, dense, every byte read: ahead of every peer"]

    # The figure is a median, so that one round that differs does not count.
    fast, slow = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 5.0], [1.3, 1.3, 1.4, 1.4, 1.5, 1.5, 0.2]
    low, high = [[begin + index / 10 for index in range(7)] for begin in (1.0, 1.1)]
    assert [verdict(fast, slow), verdict(slow, fast)] == ["met", "**missed**"]
    assert [verdict(low, high), verdict(high, low)] == ["equal", "equal"]
    assert verdict(fast[:3], slow) == "met, rounds: 3"


def in_files():
    """The disk was slower while the peer loaded, so that libraries are compared by shares of a raw read."""
    entries = [load("fst", "cold", 0.52, share_of_raw_read=share) for share in (0.80, 0.81, 0.82)]
    entries += [load("safetensors", "cold", 2.0, share_of_raw_read=share) for share in (0.90, 0.91, 0.92)]
    expected = {
        "Cold -> CPU, dense, every byte read: ahead of every peer, as a share of a raw read": "**missed**, rounds: 3",
        "Cold -> CPU, dense, every byte read: of the rate of direct-reads": "met",
    }
    return entries, {"ceilings": [("direct-reads", 2e9)]}, expected


def on_gpu():
    figures = {"beyond_host_bytes": 300 * MIB, "device_scratch_bytes": 64 * MIB}
    entries = [
        load("fst", "tmpfs", 0.021, second_load_seconds=0.0205, **figures),
        load("instanttensor", "tmpfs", 0.0209),
        load("safetensors", "tmpfs", 0.2),
    ]
    expected = {
        "tmpfs -> GPU, dense: of the pinned rate": "met",
        "tmpfs -> GPU, dense, second load in a process: of the pinned rate": "met",
        "tmpfs -> GPU, dense: ahead of every peer": "**missed**, rounds: 1",
        "Host memory of a load to the GPU, largest of all": "**missed**",
        "Device memory beyond the tensors, largest of all": "met",
        "Adapter -> GPU, second load in a process": NOT_MEASURED,
    }
    return entries, {"device": "cuda", "ceilings": [("pinned-to-device", 50e9)]}, expected


def by_ranks():
    def group(peer, seconds, link_bytes=51):
        figures = {
            "load_seconds": 1.0,
            "storage_bytes": 100,
            "link_bytes": link_bytes,
            "load_and_read_seconds": seconds,
        }
        return {"layout": "rows", "ranks": 2, "state": "cold", "peer": peer} | figures

    entries = [
        group("fst", 2.0),
        group("fst-exchange", 3.0, 60),
        group("fastsafetensors", 4.0),
        group("fastsafetensors-buffered", 2.5),
    ]
    compared = "at least as fast as fastsafetensors"
    expected = {
        f"Cold -> CPU, rows on 2 ranks: {compared}": "met, rounds: 1",
        f"Cold -> CPU, rows on 2 ranks, exchange: {compared}": "**missed**, rounds: 1",
        "Ranks that exchange, rows, cold: bytes read over those of the checkpoint": "met",
        "Ranks that exchange, rows, cold: bytes sent over those needed": "**missed**",
        "Ranks that exchange, columns, cold: bytes read over those of the checkpoint": NOT_MEASURED,
    }
    return entries, {"workloads": {"ranks": {"bytes": 100, "needed_bytes": {"rows 2": 50}}}}, expected


def from_services():
    entries = [
        load("fst", "http", beyond_host_bytes=300 << 20),
        load("fst-into", "http", load_seconds=2.0),
        load("obstore", "http", load_and_read_seconds=2.0, cpu_seconds_per_gb=0.5),
        load("fst", "far", share_of_streams=0.95),
        load("fst", "far", 0.1, "adapter", streams_seconds=0.0125),
        {"layout": "rows", "ranks": 2, "state": "http", "peer": "fst", "share_of_object": 1.004},
        {"layout": "rows", "ranks": 4, "state": "http", "peer": "fst", "share_of_object": 1.2},
    ]
    expected = {
        "HTTP -> CPU, dense, new tensors: of the rate of the server, drained": "met",
        "HTTP -> CPU, dense, existing tensors: of the rate of the server, drained": "**missed**",
        "HTTP -> CPU, dense, every byte read: ahead of every peer": "met, rounds: 1",
        "HTTP -> CPU, dense: CPU time of 1 GB, the least of all": "**missed**, rounds: 1",
        "Remote -> CPU: host memory beyond the tensors, largest of all": "**missed**",
        "Far HTTP -> CPU, dense: of the rates of its connections": "met",
        "Far HTTP -> CPU, adapter: 4 round trips, and its bytes over its connections": "**missed**",
        "HTTP -> CPU, rows on up to 4 ranks: bytes sent over those of the files": "**missed**",
        "S3 -> CPU, dense, new tensors: of the rate of the server, drained": NOT_MEASURED,
    }
    return entries, {"ceilings": [("http", 1e9)]}, expected


@pytest.mark.parametrize(
    ("part", "make"), [("cpu", in_files), ("cuda", on_gpu), ("ranks", by_ranks), ("remote", from_services)]
)
def test_goals(part, make, tmp_path):
    entries, facts, expected = make()
    found = verdicts(part, made_run(tmp_path, entries, **facts))
    assert {text: found[text] for text in expected} == expected


def test_failed_round_has_reason(tmp_path):
    failed = {"workload": "dense", "action": "load", "state": "warm", "peer": "safetensors", "failed": "wrong tensors"}
    run = made_run(tmp_path, [load("fst", "warm"), load("safetensors", "warm"), failed])
    report = markdown({"cpu": run})
    assert "| safetensors 0.8.0 | - | - |" in report
    assert "- safetensors 0.8.0: wrong tensors." in report


def test_parts_without_results_stay(tmp_path):
    page = (CHECKOUT / "BENCHMARKS.md").read_text()
    assert markdown({}, before=page) == page
    begin, end = (page.index(f"<!-- part: {name} -->\n") for name in ("cpu", "verified"))
    written = markdown({"cpu": made_run(tmp_path, [load("fst", "warm")])}, before=page)
    assert written.startswith(page[:begin])
    assert written.endswith(page[end:])
    assert "| fst | 1.00 s [1.00 .. 1.00] |" in written[begin : -len(page[end:])]
