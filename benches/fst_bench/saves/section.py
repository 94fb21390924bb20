"""Tables of saves by several ranks in BENCHMARKS.md."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ..goal import Goal
from ..machine import machine_lines
from ..text import quotient, seconds, share, size, table
from .state import LAYOUTS

SAVES = "saves.json"  # in the folder of the raw results

# Bounds: of direct writes in one process, of the time of the writer that consolidates, and of the bytes of the tensors.
# The file system reads and writes some blocks of its own, also for direct writes.
DIRECT_SHARE, CONSOLIDATED_SHARE, WRITTEN_SHARE, READ_SHARE = 1.1, 0.5, 1.005, 0.001

INTRODUCTION = """\
The ranks of a gloo group save DTensors of BF16 together, into an empty directory. *Durable* is the time until the last
rank has returned and the files are flushed to the disk; some methods leave that to the kernel, so the bench calls
`fsync` for them. *Pause* is the time until training may go on. *Written* is what the kernel counted as written by all
ranks, over the bytes of the tensors. *Extra memory* is the largest increase of the peak resident set of a rank, with
pages of mapped files. *CPU* is that of all ranks. What a method writes in the format of safetensors is compared with
the full tensors.
"""

Figures = Mapping[str, list[float]]


def saves_section(result: Mapping[str, Any]) -> Iterator[str]:
    yield from machine_lines(result, result["rounds"])
    yield INTRODUCTION
    facts = result["workload"]
    yield f"{size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']}).\n"
    cells = _by_cell(result)
    yield "### Goals\n"
    goals = [goal.row for (layout, ranks), cell in cells.items() for goal in _goals(layout, ranks, cell, result)]
    yield from table(["goal", "fst", "bound", "verdict"], goals)
    for (layout, ranks), cell in cells.items():
        yield f"### {LAYOUTS[layout].title}, {ranks} ranks\n"
        rows = [_row(title, cell[name], facts["bytes"]) for name, title in result["titles"].items() if name in cell]
        yield from table(["", "durable", "pause", "CPU", "written", "read from the disk", "extra memory"], rows)


def _by_cell(result: Mapping[str, Any]) -> Mapping[tuple[str, int], Mapping[str, Figures]]:
    """Returns the values of all rounds by layout and ranks, method and figure."""
    cells: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for entry in result["measurements"]:
        methods = cells.setdefault((entry["layout"], entry["ranks"]), {})
        figures = methods.setdefault(entry["method"], {})
        for key in entry.keys() - {"layout", "ranks", "method"}:
            figures.setdefault(key, []).append(entry[key])
    return cells


def _goals(layout: str, ranks: int, cell: Mapping[str, Figures], result: Mapping[str, Any]) -> Iterator[Goal]:
    if "fst" not in cell:
        return
    where = f"{LAYOUTS[layout].title}, {ranks} ranks"
    own = statistics.median(cell["fst"]["durable_seconds"])
    for other, name, bound in (
        ("direct-writes", "direct writes in one process", DIRECT_SHARE),
        ("consolidated-on-one", "a save that rank 0 consolidates", CONSOLIDATED_SHARE),
        ("consolidated-on-all", "a save that all ranks consolidate", CONSOLIDATED_SHARE),
    ):
        if other in cell:
            ratio = own / statistics.median(cell[other]["durable_seconds"])
            yield Goal(f"{where}: time, of {name}", ratio, bound, quotient, rounds=result["rounds"])
    written = statistics.median(cell["fst"]["written_bytes"]) / result["workload"]["bytes"]
    yield Goal(f"{where}: bytes written, of the tensors", written, WRITTEN_SHARE, share, rounds=result["rounds"])
    read = statistics.median(cell["fst"]["storage_bytes"]) / result["workload"]["bytes"]
    yield Goal(f"{where}: bytes read, of the tensors", read, READ_SHARE, share, rounds=result["rounds"])


def _row(title: str, figures: Figures, size_bytes: int) -> list[str]:
    medians = {key: statistics.median(values) for key, values in figures.items()}
    durable = figures["durable_seconds"]
    return [
        title,
        f"{seconds(medians['durable_seconds'])} [{seconds(min(durable))} .. {seconds(max(durable))}]",
        seconds(medians["pause_seconds"]),
        seconds(medians["cpu_seconds"]),
        quotient(medians["written_bytes"] / size_bytes),
        size(medians["storage_bytes"]),
        size(medians["extra_bytes"]),
    ]
