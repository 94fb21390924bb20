"""Table of small calls in BENCHMARKS.md."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..machine import machine_lines
from ..text import quotient, table

SMALL_CALLS = "small_calls.json"  # in the folder of the raw results

INTRODUCTION = """\
Both libraries make the same calls in one process, in turn. Times are CPU times of all threads, for one call or, where a
call returns many tensors, for one tensor. A call of Python itself takes about 0.05 us.
"""


def small_calls_section(result: Mapping[str, Any]) -> Iterator[str]:
    yield from machine_lines(result, result["rounds"])
    yield INTRODUCTION
    versions = result["versions"]
    head = ["CPU time", *(f"{library} {version}" for library, version in versions.items()), "times"]
    yield from table(head, [_row(title, seconds, list(versions)) for title, seconds in result["calls"].items()])


def _row(title: str, seconds: Mapping[str, Sequence[float]], libraries: Sequence[str]) -> list[str]:
    medians = [statistics.median(seconds[library]) for library in libraries if library in seconds]
    times = quotient(medians[0] / medians[1]) if len(medians) == len(libraries) else "-"
    return [title, *(_spread(seconds[library]) if library in seconds else "-" for library in libraries), times]


def _spread(seconds: Sequence[float]) -> str:
    microseconds = sorted(value * 1e6 for value in seconds)
    return f"{statistics.median(microseconds):.2f} us [{microseconds[0]:.2f} .. {microseconds[-1]:.2f}]"
