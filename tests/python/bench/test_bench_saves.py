"""The benchmark of saves by several ranks: a small run, and its page."""

import json
import subprocess
import sys

import pytest

from fst_bench.saves.section import SAVES


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ):
    places = [argument for name in ("out", "report", "cache-dir") for argument in (f"--{name}", str(tmp_path))]
    methods = ["fst", "fst-background", "consolidated-on-one", "gather-fst", "direct-writes"]
    command = [sys.executable, "-m", "fst_bench.saves", "--gib", "0.02", "--rounds", "1", "--ranks", "2", *places]
    command += ["--layouts", "columns", "--methods", *methods]
    subprocess.run(command, env=python_environ, check=True, capture_output=True)
    entries = json.loads((tmp_path / SAVES).read_text())["measurements"]
    figures = {entry["method"]: entry for entry in entries}
    assert figures.keys() == set(methods)
    assert figures["consolidated-on-one"]["written_bytes"] > 1.5 * figures["fst"]["written_bytes"] > 0
    background = figures["fst-background"]
    assert 0 < background["pause_seconds"] < background["seconds"] <= background["durable_seconds"]
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert "## Saves by several ranks\n\n`python -m fst_bench.saves --gib 0.02" in page
    assert "matrices cut by columns, 2 ranks: time, of a save that rank 0 consolidates" in page
