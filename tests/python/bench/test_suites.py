"""Every suite in small: its cases have figures, its tensors are right, and the page has its part."""

import subprocess
import sys

import pytest
import torch

from fst_bench.digest import digest
from fst_bench.files import Files
from fst_bench.page import details
from fst_bench.registry import PARTS
from fst_bench.report import RECORDS, read_records
from fst_bench.result import Run, reason_of
from fst_bench.run import parser_of

ON_RANKS = "--ranks 2 --layouts columns"
READ = "load_and_read_seconds"
# Arguments of a small run of each suite, and figures of one case that have an order.
SMALL = {
    "files": (
        # test_lease.py runs plain loads.
        "--gib 0.0003 --workloads dense --states cold,disk --actions columns,pretrained,verified,save --peers fst "
        "--ceilings direct-writes",
        {"action": "columns"},
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
    "convert": ("--gib 0.001 --workloads gpt-oss", {"method": "fst"}, ["cpu_seconds"]),
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
        assert [entry for entry in run.entries if reason_of(entry)] == []
        for low, high in zip([0, *(run.median(case, key) for key in keys)], keys, strict=False):
            assert low < run.median(case, high)
    for part, record in read_records(tmp_path / RECORDS).items():
        # Directories are specific to one machine.
        assert record["command"].split() == ["fst-bench", name, *arguments.split(), "--rounds", "1", "--no-install"]
        assert details(record).startswith(f"# {PARTS[part].title}\n")


def test_wrong_tensors_fail(tmp_path, monkeypatch):
    folders = [text for option in ("--out", "--cache-dir") for text in (option, str(tmp_path))]
    args = parser_of(Files, "fst-bench").parse_args([*folders, "--no-install"])
    vars(args).update(command="test", size_bytes=64 << 10, workloads=["many"], states=["warm"], actions=["load"])
    vars(args).update(peers=["fst"], ceilings=[], rounds=2)
    monkeypatch.setattr(Files, "load", lambda *_: {"digests": ["another"], "load_seconds": 1.0})
    assert not Files(args, "cpu").run()
    [entry] = Run.read(tmp_path / "cpu.json").entries
    assert reason_of(entry) == "the tensors differ from the checkpoint"


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
