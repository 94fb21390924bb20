"""Base of the suites: every case of a suite is measured once a round, and its figures are kept as JSON."""

import argparse
import json
import math
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from .child import run_child
from .machine import commit, load_average, machine_facts
from .result import reason_of

# Figures of a case, or the reason why it has none.
Figures = dict[str, Any]
# Figures of which the first is shown while a suite runs.
SHOWN = ("save_seconds", "durable_seconds", "load_seconds", "seconds", "cpu_seconds", "windows")


class Case(NamedTuple):
    """Measurement of a suite.

    Attributes:
        name: Fields that name it in the results.
        call: Sets up and measures, in the round of this number. Returns figures, rows of figures with more fields of a
            name, {"failed": reason}, {"unavailable": reason}, or nothing if the time is over.
        digest: Digest of the right tensors, if figures have "digests" of those that were measured.
        may_fail: Whether the tables list it without figures. Otherwise the run fails.
        kind: List of the results to which it belongs: measurements, or ceilings of the hardware or of a server.
    """

    name: Mapping[str, Any]
    call: Callable[[int], Figures | Sequence[Figures]]
    digest: str = ""
    may_fail: bool = False
    kind: str = "measurements"


class Option(NamedTuple):
    """List that is an argument of a suite: some of the known names or numbers, or any numbers."""

    default: Sequence[Any]
    known: Sequence[Any] = ()


class Suite(ABC):
    """Suite of cases: its arguments, its set-up, and its results so far.

    Attributes:
        name: Word of the command line, and by default the name of the file of the results.
        options: Arguments that are lists, besides the arguments of all suites.
        arguments: Other such arguments, with what `argparse` takes for them.
        rounds, minutes, gib, directory: Defaults of common arguments. Without `gib`, the size fits the machine.
        has_page: Whether BENCHMARKS.md has a part of the results.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]] = {}
    arguments: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    rounds: ClassVar[int] = 7
    minutes: ClassVar[float | None] = None
    gib: ClassVar[Sequence[float]] = (1.0,)
    directory: ClassVar[Path | None] = None
    has_page: ClassVar[bool] = True

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.file = self.name
        self._end = math.inf
        # A case that failed once has no median, so it is not run again.
        self._failed: set[tuple[Any, ...]] = set()
        self._errors = 0
        self.results: dict[str, Any] = {
            "command": args.command,
            "commit": commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": "cpu",
            "machine": machine_facts(args.cache_dir),
            "load_average_before": load_average(),
            "workloads": {},
            "measurements": [],
            "ceilings": [],
        }

    @classmethod
    def made(cls, args: argparse.Namespace) -> "Iterator[Suite]":
        """Yields the suites that run with these arguments."""
        yield cls(args)

    @abstractmethod
    def start(self, stack: ExitStack) -> None:
        """Makes what all rounds share, and pushes its end on the stack. This time does not count."""

    @abstractmethod
    def tables(self) -> Iterator[Sequence[Case]]:
        """Yields the cases of a round in their order. Cases of one table run in a random order."""

    def run(self) -> bool:
        """Runs all rounds. Returns False if tensors were wrong, or if a case failed that may not fail.

        A measurement that is still running at the time limit is ended and not counted.
        """
        rounds, seconds = self.args.rounds, (self.args.minutes or math.inf) * 60
        with ExitStack() as stack:
            self.start(stack)
            self._end = time.monotonic() + seconds
            for number in range(rounds):
                begin = time.monotonic()
                self._run_round(number)
                log(f"{self.file}: round {number + 1} of {rounds} took {time.monotonic() - begin:.0f} s")
                if not self.left_seconds():
                    log(f"time is up in round {number + 1} of {rounds}")
                    break
        return self._errors == 0

    def child(self, work: str, environment: Mapping[str, str] | None = None, /, **arguments: Any) -> Figures:
        """Calls a function of this package in a process that ends with the time of the run."""
        return run_child(work, arguments, environment, self.left_seconds())

    def left_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def summary(self, row: Mapping[str, Any]) -> str:
        """Returns figures in one line."""
        words = [text for text in row.values() if isinstance(text, str) and text != row.get("version")]
        if reason := reason_of(row):
            return f"- ({reason})"
        if "bytes_per_second" in row:
            return f"{row['bytes_per_second'] / 1e9:.2f} GB/s"
        shown = next((f"{row[key]:.4g} {key.rpartition('_')[2]}" for key in SHOWN if key in row), "")
        return " ".join([*words, shown])

    def _run_round(self, number: int) -> None:
        # The rate of a disk may change in the course of a round. In a fixed order, it would be another for each peer.
        order = random.Random(number)
        for table in self.tables():
            for case in order.sample(table, len(table)):
                if not self.left_seconds():
                    return
                if (key := tuple(case.name.values())) not in self._failed:
                    measured = case.call(number)
                    rows = [measured] if isinstance(measured, dict) else measured
                    kept = [self._checked(case, row) for row in rows if row]
                    if any(reason_of(row) for row in kept):
                        self._failed.add(key)
                    for row in kept:
                        self._keep(case, number, row)

    def _checked(self, case: Case, row: Figures) -> Figures:
        """Returns the figures if the tensors are right, and counts errors."""
        if set(row.pop("digests", [case.digest])) != {case.digest}:
            self._errors += 1
            return {"failed": "the tensors differ from the checkpoint"}
        if reason_of(row) and not case.may_fail:
            self._errors += 1
        return row

    def _keep(self, case: Case, number: int, row: Figures) -> None:
        """Prints figures and writes all results so far, so that an interrupted run loses nothing."""
        log(f"round {number + 1}: {', '.join(map(str, case.name.values()))}: {self.summary(row)}")
        self.results[case.kind].append({**case.name, "round": number, **row})
        self.results["load_average_after"] = load_average()
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / f"{self.file}.json").write_text(json.dumps(self.results, indent=1) + "\n")


def log(text: str) -> None:
    """Prints the progress of a run."""
    print(text, file=sys.stderr, flush=True)
