"""The budget of cases and CPU seconds."""

from collections import Counter

import budget
from suite import CHECKOUT

TOO_MANY = [
    ({"load": 1200}, []),
    ({"load": 1201}, ["load has 1201 cases, and may have 1200"]),
    ({"new": 1}, ["new has no row in tests.md"]),
]
TOO_SLOW = [({"load": 90.0}, []), ({"load": 91.2}, ["load took 91 CPU seconds, and should take 90"])]


def test_excesses(tmp_path, monkeypatch):
    page = tmp_path / "tests.md"
    page.write_text("| folder | cases | CPU seconds |\n|---|---|---|\n| `load` | 1,200 | 90 |\n")
    monkeypatch.setattr(budget, "TABLE", page)
    monkeypatch.setattr(budget, "CHECKOUT", tmp_path)
    for cases, expected in TOO_MANY:
        assert list(budget.too_many(Counter(cases))) == expected
    for seconds, expected in TOO_SLOW:
        assert list(budget.too_slow(Counter(seconds))) == expected


def test_every_folder_has_a_budget():
    tests = (CHECKOUT / "tests" / "python").glob("*/**/test_*.py")
    folders = {path.relative_to(CHECKOUT / "tests" / "python").parts[0] for path in tests}
    assert budget.budgets().keys() == folders
