"""The benchmark of checkpoints of `torch.distributed.checkpoint`: a small run, and its page."""

import json
import subprocess
import sys

import pytest


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ):
    options = ["--gib", "0.001", "--rounds", "1", "--layouts", "columns", "--ranks", "2", "--states", "warm"]
    folders = [text for name in ("--out", "--report", "--cache-dir") for text in (name, str(tmp_path))]
    command = [sys.executable, "-m", "fst_bench.dcp", *options, *folders]
    subprocess.run(command, check=True, env=python_environ)
    result = json.loads((tmp_path / "dcp.json").read_text())
    assert {entry["method"] for entry in result["measurements"]} == {"fst", "pytorch"}
    # Pages of the libraries may be read in the measurement, so that the bytes from the disk are not compared.
    assert all(entry["cpu_seconds"] > 0 for entry in result["measurements"])
    page = (tmp_path / "BENCHMARKS.md").read_text()
    # The directories are those of this machine only.
    command = " ".join(["python", "-m", "fst_bench.dcp", *options])
    assert f"## Checkpoints of torch.distributed.checkpoint\n\n`{command}` on " in page
    assert "columns, warm page cache, 2 ranks: time of `HuggingFaceStorageReader`, of fst's" in page
