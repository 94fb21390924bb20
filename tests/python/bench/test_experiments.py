"""The experiments that decide how loads to a GPU work, on the simulated driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from suite import CHECKOUT

# `make rust-tests` builds it.
DRIVER = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")) / "debug" / "deps" / "libfst_simcuda.so"
NAMES = ("probe", "copies", "registration", "waits", "allocation", "objects", "tmpfs")


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ):
    command = [sys.executable, "-m", "fst_bench.experiments", "--small", "--driver", str(DRIVER)]
    environ = python_environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", *NAMES], env=environ, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    results = json.loads((tmp_path / "gpu-experiments.json").read_text())
    assert set(results) == set(NAMES)
    assert all(results.values())
    what = {row["what"]: row["values"] for rows in results.values() for row in rows}
    assert what["PCI address: 0000:51:00.0"] == []
    assert what["tmpfs, second load"][0] > 0
    parameters = dict(line.split(" = ") for line in (tmp_path / "gpu-experiments.toml").read_text().splitlines())
    assert float(parameters["link_gbps"]) > 0
    assert float(parameters["event_us"]) > 0
