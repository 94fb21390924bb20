"""Cases and CPU time of each folder of tests, compared with the table in docs/decisions/tests.md.

A run of all tests fails if a folder has more cases than the table allows, and warns if it took more CPU seconds, which
also depend on the machine.
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


def too_many(cases: Counter[str]) -> Iterator[str]:
    """Yields a line for each folder that has more cases than its budget, or no budget."""
    limits = budgets()
    for folder in sorted(cases):
        if folder not in limits:
            yield f"{folder} has no row in {TABLE.relative_to(CHECKOUT)}"
        elif cases[folder] > (most := limits[folder][0]):
            yield f"{folder} has {cases[folder]} cases, and may have {most}"


def too_slow(seconds: Counter[str]) -> Iterator[str]:
    """Yields a line for each folder that took more CPU seconds than its budget."""
    for folder, (_, most) in sorted(budgets().items()):
        if seconds[folder] > most:
            yield f"{folder} took {seconds[folder]:.0f} CPU seconds, and should take {most}"


class Budget:
    """Plugin of pytest. In a run of several processes, those that run tests measure, and the first one compares."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.begin = _cpu_seconds()
        self.errors: list[str] = []
        self.warnings: list[str] = []

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
            self.errors = list(too_many(self.cases))
            self.warnings = list(too_slow(self.seconds))
        if self.errors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("cases and CPU seconds")
        for folder in sorted(self.cases):
            terminalreporter.write_line(f"{folder:16} {self.cases[folder]:6} {self.seconds[folder]:8.1f}")
        for line in self.warnings:
            terminalreporter.write_line(f"over the budget: {line}", yellow=True)
        for line in self.errors:
            terminalreporter.write_line(f"over the budget: {line}", red=True)


def _cpu_seconds() -> float:
    """Returns the CPU time of this process, of children that have ended, and of processes that outlive a test."""
    return sum(os.times()[:4]) + forked.cpu_seconds()
