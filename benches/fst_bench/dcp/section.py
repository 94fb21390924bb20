"""Tables of checkpoints by ranks in BENCHMARKS.md."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..goal import Goal
from ..machine import machine_lines
from ..result import Figure
from ..text import quotient, seconds, size, table
from .layouts import LAYOUT_TITLES
from .methods import METHODS

DCP = "dcp.json"  # in the folder of the raw results

STATES = {"warm": "warm page cache", "cold": "cold page cache"}
ACTION_TITLES = {"load": "`dcp.load` into existing tensors"}
HEAD = ["ranks", "", "seconds", "times", "CPU", "from the disk", "extra memory"]

INTRODUCTION = """\
All ranks call `torch.distributed.checkpoint.load` with a state dict of DTensors on the CPU, over gloo, one thread of
PyTorch each. The time is that of the group, from the first call to the last return. *Times* is that of the fst reader
over this one. *CPU* and *from the disk* are sums over the ranks, and *extra memory* is the largest increase of a rank's
peak resident set, with pages of mapped files.
"""

Figures = Mapping[str, list[float]]


class Row(NamedTuple):
    """What the figures of one or more methods are compared for."""

    action: str
    bytes: int
    layout: str
    state: str
    ranks: int


def dcp_section(result: Mapping[str, Any]) -> Iterator[str]:
    yield from machine_lines(result, result["rounds"])
    yield INTRODUCTION
    rows = _by_row(result["measurements"])
    yield "### Goals\n"
    goals = [goal for row, methods in rows.items() for goal in _goals(row, methods, result["rounds"])]
    yield from table(["goal", "fst", "bound", "verdict"], [goal.row for goal in goals])
    for facts in result["workloads"]:
        for action, title in ACTION_TITLES.items():
            for layout, layout_title in LAYOUT_TITLES.items():
                for state, state_title in STATES.items():
                    lines = [
                        line
                        for row, methods in rows.items()
                        if row[:4] == (action, facts["bytes"], layout, state)
                        for line in _lines(row, methods)
                    ]
                    if lines:
                        yield f"### {title}, {size(facts['bytes'])}, {layout_title}, {state_title}\n"
                        yield from table(HEAD, lines)


def _by_row(measurements: Sequence[Mapping[str, Any]]) -> Mapping[Row, Mapping[str, Figures]]:
    """Returns the values of all rounds by row, method and figure."""
    rows: dict[Row, dict[str, dict[str, list[float]]]] = {}
    for entry in measurements:
        row = Row(*(entry[key] for key in Row._fields))
        figures = rows.setdefault(row, {}).setdefault(entry["method"], {})
        for key in ("seconds", "cpu_seconds", "read_bytes", "extra_bytes"):
            figures.setdefault(key, []).append(entry[key])
    return dict(sorted(rows.items()))


def _goals(row: Row, methods: Mapping[str, Figures], rounds: int) -> Iterator[Goal]:
    own, *others = METHODS[row.action]
    for other in others:
        mine, theirs = (Figure.of(methods.get(name, {}).get("seconds", [])) for name in (own, other))
        if mine and theirs:
            times, overlaps = theirs.median / mine.median, mine.overlaps(theirs)
            where = f"{size(row.bytes)}, {row.layout}, {STATES[row.state]}, {row.ranks} ranks"
            text = f"{row.action.capitalize()}, {where}: time of {METHODS[row.action][other].title}, of fst's"
            yield Goal(text, times, 1.0, quotient, at_least=True, overlaps=overlaps, rounds=rounds)


def _lines(row: Row, methods: Mapping[str, Figures]) -> Iterator[list[str]]:
    own = statistics.median(methods[next(iter(METHODS[row.action]))]["seconds"])
    for name, method in METHODS[row.action].items():
        if figures := methods.get(name):
            times = own / statistics.median(figures["seconds"])
            cpu, read, extra = (statistics.median(figures[key]) for key in ("cpu_seconds", "read_bytes", "extra_bytes"))
            spread = _spread(figures["seconds"])
            yield [str(row.ranks), method.title, spread, quotient(times), seconds(cpu), size(read), size(extra)]


def _spread(values: list[float]) -> str:
    return f"{seconds(statistics.median(values))} [{seconds(min(values))} .. {seconds(max(values))}]"
