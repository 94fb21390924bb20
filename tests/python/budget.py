"""Cases and CPU time of each folder of tests, compared with the table in docs/decisions/tests.md.

A run of all tests fails if a folder has more cases, or took more CPU seconds, than the table allows.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forked
from suite import CHECKOUT

TABLE = CHECKOUT / "docs" / "decisions" / "tests.md"
# Name of a property of reports: the CPU seconds of one phase of a test, including child processes.
PROPERTY = "cpu_seconds"


def budgets() -> dict[str, tuple[int, int]]:
    """Returns the number of cases and of CPU seconds that each folder may have."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \|$", TABLE.read_text(), re.MULTILINE)
    return {folder: (int(cases.replace(",", "")), int(seconds.replace(",", ""))) for folder, cases, seconds in rows}


def excesses(cases: Counter[str], seconds: Counter[str]) -> Iterator[str]:
    """Yields a line for each folder that is over its budget, or has none."""
    limits = budgets()
    for folder in sorted(cases):
        if folder not in limits:
            yield f"{folder} has no row in {TABLE.relative_to(CHECKOUT)}"
            continue
        most_cases, most_seconds = limits[folder]
        if cases[folder] > most_cases:
            yield f"{folder} has {cases[folder]} cases, and may have {most_cases}"
        if seconds[folder] > most_seconds:
            yield f"{folder} took {seconds[folder]:.0f} CPU seconds, and may take {most_seconds}"


class Budget:
    """Plugin of pytest. In a run of several processes, those that run tests measure, and the first one compares."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.begin = _cpu_seconds()
        self.excesses: list[str] = []

    def pytest_runtest_logstart(self) -> None:
        self.begin = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        end = _cpu_seconds()
        report.user_properties.append((PROPERTY, end - self.begin))
        self.begin = end
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.partition("::")[0]).relative_to("tests/python").parts[0]
        self.cases[folder] += report.when == "setup"
        self.seconds[folder] += dict(report.user_properties).get(PROPERTY, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        has_all = config.args_source == config.ArgsSource.TESTPATHS and not (
            config.option.keyword or config.option.markexpr
        )
        is_first = not hasattr(config, "workerinput")
        # With a GPU, more readers have tests.
        if has_all and is_first and not session.shouldstop and not torch.cuda.is_available():
            self.excesses = list(excesses(self.cases, self.seconds))
        if self.excesses and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("cases and CPU seconds")
        for folder in sorted(self.cases):
            terminalreporter.write_line(f"{folder:16} {self.cases[folder]:6} {self.seconds[folder]:8.1f}")
        for line in self.excesses:
            terminalreporter.write_line(f"over the budget: {line}", red=True)


def _cpu_seconds() -> float:
    """Returns the CPU time of this process, of children that have ended, and of processes that outlive a test."""
    return sum(os.times()[:4]) + forked.cpu_seconds()
