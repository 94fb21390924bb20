"""The budget of cases and CPU seconds."""

from collections import Counter

import budget
from suite import CHECKOUT

EXCESSES = [
    ({"load": 1200}, {"load": 90.0}, []),
    ({"load": 1201}, {"load": 1.0}, ["load has 1201 cases, and may have 1200"]),
    ({"load": 1}, {"load": 91.2}, ["load took 91 CPU seconds, and may take 90"]),
    ({"new": 1}, {"new": 1.0}, ["new has no row in tests.md"]),
]


def test_excesses(tmp_path, monkeypatch):
    page = tmp_path / "tests.md"
    page.write_text("| folder | cases | CPU seconds |\n|---|---|---|\n| `load` | 1,200 | 90 |\n")
    monkeypatch.setattr(budget, "TABLE", page)
    monkeypatch.setattr(budget, "CHECKOUT", tmp_path)
    for cases, seconds, expected in EXCESSES:
        assert list(budget.excesses(Counter(cases), Counter(seconds))) == expected


def test_every_folder_has_a_budget():
    tests = (CHECKOUT / "tests" / "python").glob("*/**/test_*.py")
    folders = {path.relative_to(CHECKOUT / "tests" / "python").parts[0] for path in tests}
    assert budget.budgets().keys() == folders
