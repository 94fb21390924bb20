"""Recordings of profiles, parsed from their traces."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from fst._profile.stages import OUTER_STAGES, READ_AHEAD, Stage

# Begin and end, in seconds since the profile began.
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Execution of a stage, in seconds of the profile. `row` has the numbers of its process and thread."""

    stage: Stage
    row: tuple[int, int]
    begin_seconds: float
    end_seconds: float
    bytes: int
    arguments: dict[str, Any]

    @property
    def interval(self) -> Interval:
        """Begin and end."""
        return self.begin_seconds, self.end_seconds


class Recording:
    """Spans and metrics of a trace.

    Attributes:
        trace: The text of the trace.
        metrics: Values besides the spans; see `Summary` for the meaning of each.
        spans: The spans in the order in which they began.
        row_names: The name of each row.
    """

    def __init__(self, trace: str) -> None:
        content = json.loads(trace)
        self.trace = trace
        self.metrics: dict[str, Any] = content["otherData"]
        self.spans = [_span(event) for event in content["traceEvents"] if event["ph"] == "X"]
        self.row_names = _row_names(content["traceEvents"])
        self._totals = {total["stage"]: total for total in self.metrics["stages"]}
        self._self_intervals: dict[Stage, list[tuple[Span, Interval]]] = {}
        for span, interval in _self_intervals(self.spans):
            self._self_intervals.setdefault(span.stage, []).append((span, interval))

    @property
    def stages(self) -> list[Stage]:
        """The recorded stages, in the order in which they process a byte."""
        return list(self._totals)

    @property
    def seconds(self) -> float:
        """Duration in which any stage ran, except background read-ahead."""
        return covered_seconds(span.interval for span in self.spans if span.stage != READ_AHEAD)

    @property
    def outside_seconds(self) -> float:
        """Duration in which loads or saves ran, but none of their stages."""
        inner = (span.interval for span in self.spans if span.stage not in (*OUTER_STAGES, READ_AHEAD))
        return self.seconds - covered_seconds(inner)

    @property
    def storage_bytes(self) -> int | None:
        """Number of bytes that came from storage of this machine or from remote stores, not from the page cache."""
        local_bytes: int | None = self.metrics["storage_bytes"]
        return None if local_bytes is None else local_bytes + self.remote_bytes

    @property
    def remote_bytes(self) -> int:
        """Number of bytes that were read from remote stores."""
        remote_bytes: int = self.metrics["remote_bytes"]
        return remote_bytes

    def spans_of(self, stage: Stage) -> list[Span]:
        """Returns the spans of a stage."""
        return [span for span in self.spans if span.stage == stage]

    def total(self, stage: Stage, field: Literal["spans", "bytes"]) -> int:
        """Returns the total of all spans of a stage, including dropped ones."""
        total: int = self._totals[stage][field] if stage in self._totals else 0
        return total

    def self_intervals(self, *stages: Stage) -> Iterator[tuple[Span, Interval]]:
        """Yields the intervals of spans of these stages in which no nested span ran on the same row.

        For example, the wait for a slot excludes the allocation of its memory.
        """
        for stage in stages:
            yield from self._self_intervals.get(stage, ())

    def busy_seconds(self, *stages: Stage) -> float:
        """Returns the duration in which any row was in one of the stages, and in no nested one."""
        return covered_seconds(interval for _, interval in self.self_intervals(*stages))

    def thread_seconds(self, *stages: Stage) -> float:
        """Returns the sum over all rows of the durations in which a row was in one of the stages and no nested one."""
        return sum(end - begin for _, (begin, end) in self.self_intervals(*stages))


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """Returns the length of the union of intervals.

    >>> covered_seconds([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, covered_until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total


def _span(event: dict[str, Any]) -> Span:
    begin = event["ts"] / 1e6
    arguments = event["args"]
    return Span(
        event["name"], (event["pid"], event["tid"]), begin, begin + event["dur"] / 1e6, arguments["bytes"], arguments
    )


def _row_names(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {
        (event["pid"], event["tid"]): f"{processes[event['pid']]}: {event['args']['name']}"
        for event in events
        if event["name"] == "thread_name"
    }


def _self_intervals(spans: list[Span]) -> Iterator[tuple[Span, Interval]]:
    """Yields the intervals of each span without its nested spans. Two spans of a row are nested or disjoint."""
    ordered = sorted(spans, key=lambda span: (span.row, span.begin_seconds, -span.end_seconds))
    for _, row in groupby(ordered, lambda span: span.row):
        stack: list[Span] = []
        covered_until = 0.0

        def pop_until(time: float, stack: list[Span] = stack) -> Iterator[tuple[Span, Interval]]:
            nonlocal covered_until
            while stack and stack[-1].end_seconds <= time:
                span = stack.pop()
                if span.end_seconds > covered_until:
                    yield span, (covered_until, span.end_seconds)
                    covered_until = span.end_seconds

        for span in row:
            yield from pop_until(span.begin_seconds)
            if stack and span.begin_seconds > covered_until:
                yield stack[-1], (covered_until, span.begin_seconds)
            covered_until = max(covered_until, span.begin_seconds)
            stack.append(span)
        yield from pop_until(float("inf"))
