"""The measurement of small calls, with few tensors and no repetition."""

import json

from fst_bench.report import write_report
from fst_bench.small_calls import run
from fst_bench.small_calls.section import SMALL_CALLS


def test_report(tmp_path, monkeypatch):
    for name, value in {"OPEN_TENSORS": 8, "MANY_TENSORS": 8, "ROUND_SECONDS": 0}.items():
        monkeypatch.setattr(run, name, value)
    (tmp_path / SMALL_CALLS).write_text(json.dumps(run.result_of(tmp_path, 2, "a command")))
    write_report(tmp_path, tmp_path)
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert "## Small calls\n\n`a command` on " in page
    assert "medians of 2 rounds" in page
    rows = {row.split(" | ")[0]: row for row in page.splitlines() if row.startswith("| ")}
    assert rows["| get_slice"].count(" us [") == 2
    assert rows["| stream, a tensor"].endswith("] | - | - |")
