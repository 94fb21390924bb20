"""Verdicts of comparisons from prepared results, the page of the records, and the tables of decisions."""

import json
from datetime import date

from fst_bench.goal import compared
from fst_bench.page import decision_figures
from fst_bench.report import RECORDS, markdown, read_records
from fst_bench.result import RAW_SHARE, Run
from suite import CHECKOUT


def verdict(own, other, key="seconds"):
    """Returns the verdict of a comparison with another library, from a value for each round."""
    rounds = (("own", own), ("other", other))
    entries = [{"peer": peer, key: value} for peer, values in rounds for value in values]
    run = Run({"device": "cpu", "workloads": {}, "measurements": entries})
    return compared(run, "title", {"peer": "own"}, [{"peer": "other"}], "seconds").verdict


def test_figures_within_each_others_spread_are_equal():
    # The figure is a median, so that one round that differs does not count.
    fast, slow = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 5.0], [1.3, 1.3, 1.4, 1.4, 1.5, 1.5, 0.2]
    low, high = [[begin + index / 10 for index in range(7)] for begin in (1.0, 1.1)]
    assert [verdict(fast, slow), verdict(slow, fast)] == ["met", "**missed**"]
    assert [verdict(low, high), verdict(high, low)] == ["equal", "equal"]
    assert verdict(fast[:3], slow) == "met, rounds: 3"
    # The disk may have been slower while one of them loaded, so shares of a raw read are compared, if there are any.
    assert [verdict(fast, slow, RAW_SHARE), verdict(slow, fast, RAW_SHARE)] == ["**missed**", "met"]
    assert verdict([], slow) == "not measured here: not in this run"


def test_page_shows_goals_of_all_records():
    """The page in the repository matches its records. A section without records is left out."""
    records = read_records(CHECKOUT / RECORDS)
    page = markdown(records)
    assert page == (CHECKOUT / "BENCHMARKS.md").read_text()
    assert len(page.splitlines()) <= 120
    row = ["Warm cache -> GPU, dense: ahead of every peer", "2.00 s", "<= 1.00 s, safetensors", "**missed**"]
    gpu = markdown({"cuda": records["cuda"] | {"goals": [row]}})
    assert "| Warm cache -> GPU, dense | 2.00 s | <= 1.00 s, safetensors | **missed** |" in gpu
    assert "## On the CPU" not in gpu


def test_tables_of_decisions():
    """Each file has dated tables with rows of one length, and a decision that links to it."""
    folder = CHECKOUT / "docs" / "decisions"
    decisions = {file.stem: json.loads(file.read_text()) for file in sorted((folder / "figures").iterdir())}
    assert len(decisions) > 5
    for name, tables in decisions.items():
        assert f"](figures/{name}.json)" in (folder / f"{name}.md").read_text()
        for each in tables:
            assert date.fromisoformat(each["date"])
            assert {len(row) for row in each["rows"]} == {len(each["columns"])}
    page = decision_figures(decisions)
    assert page.count("\n## ") == len(decisions)
    assert "| `Tensor.copy_`, one tensor after the other | 219 ms [191] |" in page
