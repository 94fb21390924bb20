"""What a profile has recorded, read back from its trace."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One piece of work: its stage, the row of the trace it stands in, and seconds since the profile began."""

    stage: str
    row: tuple[int, int]
    begin_seconds: float
    end_seconds: float
    bytes: int
    arguments: dict[str, Any]


# Around all other stages.
WHOLE = ("load", "save")


class Recording:
    """The spans of a trace in the order in which they began, and the facts beside them."""

    def __init__(self, trace: str) -> None:
        content = json.loads(trace)
        self.trace = trace
        self.facts: dict[str, Any] = content["otherData"]
        self._totals = {total["stage"]: total for total in self.facts["stages"]}
        self.spans = [_span(event) for event in content["traceEvents"] if event["ph"] == "X"]
        self.row_names = _row_names(content["traceEvents"])
        # The stretches in which nothing finer was recorded, by stage: of a wait for a slot in which memory was
        # allocated, only the rest is waiting.
        self._own: dict[str, list[tuple[Span, Interval]]] = {}
        for span, interval in _own_intervals(self.spans):
            self._own.setdefault(span.stage, []).append((span, interval))

    @property
    def stages(self) -> list[str]:
        """The stages that happened, in the order of a byte's trip."""
        return list(self._totals)

    @property
    def seconds(self) -> float:
        """How long anything was under way, but for what reads ahead of the use of mapped files in the background."""
        return covered_seconds(_interval(span) for span in self.spans if span.stage != "read ahead")

    @property
    def outside_seconds(self) -> float:
        """How long loads and saves were under way and in none of their stages."""
        inside = covered_seconds(_interval(span) for span in self.spans if span.stage not in (*WHOLE, "read ahead"))
        return self.seconds - inside

    def of(self, stage: str) -> list[Span]:
        """The spans of a stage."""
        return [span for span in self.spans if span.stage == stage]

    def total(self, stage: str, what: str) -> Any:
        """`spans`, `bytes` or `seconds` of all spans of a stage, those that are not kept included."""
        return self._totals.get(stage, {}).get(what, 0)

    def own_intervals(self, *stages: str) -> Iterator[tuple[Span, Interval]]:
        """The stretches of spans of these stages in which nothing finer was recorded on the same row."""
        for stage in stages:
            yield from self._own.get(stage, ())

    def busy_seconds(self, *stages: str) -> float:
        """How long any thread or GPU was in one of the stages and in nothing finer."""
        return covered_seconds(interval for _, interval in self.own_intervals(*stages))

    def thread_seconds(self, *stages: str) -> float:
        """As `busy_seconds`, with two threads for a second each making two seconds."""
        return sum(end - begin for _, (begin, end) in self.own_intervals(*stages))


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """The length of what the intervals cover together.

    >>> covered_seconds([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _interval(span: Span) -> Interval:
    return span.begin_seconds, span.end_seconds


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


def _own_intervals(spans: list[Span]) -> Iterator[tuple[Span, Interval]]:
    """Each span without those inside it on its row; spans of one row are inside each other or apart."""
    for _, row in groupby(sorted(spans, key=lambda span: (span.row, span.begin_seconds, -span.end_seconds)), _row_of):
        around: list[Span] = []
        reached = 0.0

        def close_until(time: float, around: list[Span] = around) -> Iterator[tuple[Span, Interval]]:
            nonlocal reached
            while around and around[-1].end_seconds <= time:
                span = around.pop()
                if span.end_seconds > reached:
                    yield span, (reached, span.end_seconds)
                    reached = span.end_seconds

        for span in row:
            yield from close_until(span.begin_seconds)
            if around and span.begin_seconds > reached:
                yield around[-1], (reached, span.begin_seconds)
            reached = max(reached, span.begin_seconds)
            around.append(span)
        yield from close_until(float("inf"))


def _row_of(span: Span) -> tuple[int, int]:
    return span.row
