"""Every suite in small: its cases have figures, its tensors are right, and the page has its part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fst_bench.checkpoint import make_checkpoint
from fst_bench.files import Files
from fst_bench.group import Host
from fst_bench.peer import PEERS
from fst_bench.registry import PARTS
from fst_bench.result import Run, reason_of
from fst_bench.run import main, parser_of
from fst_bench.updates import METHODS, measure
from fst_bench.versions import make_versions
from fst_bench.workload import dense
from suite import CHECKOUT

# `make rust-tests` builds it.
DRIVER = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")) / "debug" / "deps" / "libfst_simcuda.so"
ON_RANKS = "--ranks 2 --layouts columns"
READ = "load_and_read_seconds"
# Arguments of a small run of each suite, and figures of one case that have an order.
SMALL = {
    "files": (
        "--gib 0.0003 --workloads dense --states cold,disk --actions load,columns,pretrained,verified,save --peers fst "
        "--ceilings direct-writes",
        {"action": "load"},
        ["load_seconds", READ],
    ),
    "ranks": (
        f"--gib 0.001 {ON_RANKS} --states warm --peers fst-blake3-exchange",
        {"ranks": 2},
        ["load_seconds", READ],
    ),
    "remote": (
        "--gib 0.001 --ranks 2 --layouts rows --services http,far --workloads adapter --peers fst",
        {"state": "far"},
        ["streams_seconds", "load_seconds", READ],
    ),
    "small_calls": ("", {"name": "get_slice", "library": "safetensors"}, ["cpu_seconds"]),
    "updates": ("--gib 0.001 --states warm --methods update", {"method": "update"}, ["blocked_seconds", "seconds"]),
    "saves": (
        f"--gib 0.02 {ON_RANKS}",
        {"method": "fst-background"},
        ["pause_seconds", "seconds", "durable_seconds"],
    ),
    "dcp": (f"--gib 0.001 {ON_RANKS} --states warm", {"method": "fst"}, ["cpu_seconds"]),
    "experiments": (
        f"--small --driver {DRIVER} --only probe copies registration waits allocation objects tmpfs",
        {},
        [],
    ),
}


@pytest.mark.benchmark
@pytest.mark.parametrize("name", SMALL)
def test_small_run(name, tmp_path, python_environ):
    arguments, case, keys = SMALL[name]
    folders = [text for option in ("--out", "--report", "--cache-dir") for text in (option, str(tmp_path))]
    command = [sys.executable, "-m", "fst_bench", name, *arguments.split(), "--rounds", "1", "--no-install", *folders]
    environ = python_environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = {path.stem: Run.read(path) for path in tmp_path.glob("*.json")}
    for run in runs.values():
        # An experiment may end early, where a kernel lacks what it tries.
        assert [entry for entry in run.entries if reason_of(entry) and name != "experiments"] == []
        for low, high in zip([0, *(run.median(case, key) for key in keys)], keys, strict=False):
            assert low < run.median(case, high)
    page = tmp_path / "BENCHMARKS.md"
    for part in PARTS.values():
        if part.results in runs:
            # Directories are those of one machine only.
            assert f"## {part.title}\n\n`fst-bench {name} {arguments}".strip() in page.read_text()
    if name == "experiments":
        parameters = dict(line.split(" = ") for line in (tmp_path / "gpu-experiments.toml").read_text().splitlines())
        assert float(parameters["link_gbps"]) > 0 < float(parameters["event_us"])
        assert {entry["name"] for entry in runs["gpu-experiments"].entries if "what" in entry} >= {"probe", "tmpfs"}


def test_updates(tmp_path):
    [path] = make_checkpoint(dense(1 << 20), tmp_path).paths
    folder = str(make_versions(path).folder)
    figures = {method: measure(method, "warm", folder) for method in METHODS}
    assert all(0 <= found["blocked_seconds"] <= found["seconds"] for found in figures.values())
    assert figures["fresh"]["extra_bytes"] > 0


@pytest.fixture
def files(tmp_path):
    """Function that returns the suite of files with these arguments, on a small workload of many tensors."""

    def make(*arguments):
        folders = [text for option in ("--out", "--cache-dir") for text in (option, str(tmp_path))]
        args = parser_of(Files, "fst-bench").parse_args([*folders, "--no-install"])
        vars(args).update(command="test", size_bytes=64 << 10, workloads=["many"], states=["warm"], actions=["load"])
        vars(args).update(*arguments)
        return Files(args, "cpu")

    return make


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({"digests": ["another"], "load_seconds": 1.0}, "the tensors are not those of the checkpoint"),
        ({"unavailable": "it is gone"}, "it is gone"),
    ],
)
def test_wrong_and_missing_tensors_of_fst_fail(measured, expected, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Files, "load", lambda *_: dict(measured))
    assert not files({"peers": ["fst"], "ceilings": [], "rounds": 2}).run()
    run = Run.read(tmp_path / "cpu.json")
    assert [reason_of(entry) for entry in run.entries] == [expected]


def test_order_of_peers(files, monkeypatch):
    """Each round measures every peer once, in an order of its own."""
    orders = []
    monkeypatch.setattr(Files, "load", lambda self, name, workload: orders.append(name["peer"]) or {})
    peers = ["fst", "fst-pread", "safetensors"]
    files({"peers": peers, "ceilings": [], "rounds": 8}).run()
    rounds = [tuple(orders[begin : begin + 3]) for begin in range(0, 24, 3)]
    assert all(sorted(order) == sorted(peers) for order in rounds)
    assert len(set(rounds)) > 1


def test_rank_that_failed_first_is_reported(monkeypatch):
    monkeypatch.setattr(Host, "__init__", lambda self: None)
    answers = [{"failed": "a timeout", "at": 2.0}, {"failed": "OSError: no files", "at": 1.0}]
    monkeypatch.setattr(Host, "ask", lambda self, task: answers)
    assert Host().run("ranks:load_shards", 2) == [{"failed": "OSError: no files"}]


def test_measured_processes_write_bytecode(monkeypatch):
    """The time of an import is that of an installed package."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    done = subprocess.run(command, env=PEERS["fst"].environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unknown_peer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fst-bench", "ranks", "--peers", "fst,nobody"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "unknown peer 'nobody'" in capsys.readouterr().err
