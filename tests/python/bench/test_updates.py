"""The benchmark of updates of a live model: a small run, and its page."""

import json

import pytest

from fst_bench.checkpoint import make_checkpoint
from fst_bench.report import write_report
from fst_bench.updates import run
from fst_bench.updates.measure import METHODS, measure
from fst_bench.updates.section import UPDATES
from fst_bench.workload import dense


@pytest.mark.benchmark
def test_small_run(tmp_path, python_environ, monkeypatch):
    for name, value in python_environ.items():
        monkeypatch.setenv(name, value)
    # One process starts Python.
    child = run.child
    monkeypatch.setattr(run, "child", lambda job: child(job) if job.method == "update" else measure(job))
    [result] = run.results(make_checkpoint(dense(1 << 20), tmp_path), ["warm"], 1, "a command")
    figures = {entry["method"]: entry for entry in result["measurements"]}
    assert figures.keys() == METHODS.keys()
    assert 0 < figures["update"]["blocked_seconds"] < figures["update"]["seconds"]
    assert figures["fresh"]["extra_bytes"] > 0
    (tmp_path / UPDATES).write_text(json.dumps(result))
    write_report(tmp_path, tmp_path)
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert "## Updates of a live model\n\n`a command` on " in page
    assert "Update, warm page cache: time of the commit, of that of a copy in memory" in page
