"""Tables of updates in BENCHMARKS.md."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..goal import Goal
from ..machine import machine_lines
from ..text import quotient, seconds, share, size, table
from .versions import CHANGED_SHARE, ENCODINGS

UPDATES = "updates.json"  # in the folder of the raw results

STATES = {"warm": "warm page cache", "cold": "cold page cache"}
UPDATE_TITLES = {
    "update": "`prepare_update` and `commit`",
    "not-atomic": "`prepare_update(atomic=False)` and `commit`",
    "delta-xor": "a delta, xor: `prepare_update` and `commit`",
    "delta-overwrite": "a delta, overwrite: `prepare_update` and `commit`",
    "load-module": "`fst.load_module`",
    "load-state-dict": "`load_state_dict` of safetensors' `load_file`",
    "patch": "changes written into the old file, then the same",
    "fresh": "`fst.load_file` of a second model, every byte read",
    "copy": "`Tensor.copy_` of tensors in memory",
}
DELTA_TITLES = {
    "make-xor": "`fst.save_delta`, xor",
    "make-overwrite": "`fst.save_delta`, overwrite",
    "read-both": "both checkpoints loaded, every byte read",
}
COPY_SHARE = 1.1
# Bounds of a delta, as shares of a load of the whole checkpoint, and of a file that is patched and loaded.
RELOAD_SHARE, PATCH_SHARE = 0.1, 0.2
READ_SHARE = 0.5

INTRODUCTION = f"""\
A process has a module on the CPU and gives it the tensors of another checkpoint, in which {CHANGED_SHARE:.0%} of the
elements differ, in their lowest two bits. *Cannot serve* is the part of the time in which the module holds a mixture,
and requests have to wait. *Extra memory* is the increase of the peak resident set, with pages of mapped files. *CPU* is
the CPU time of the process, and *from the disk* what the kernel read for it. The row of `copy_` is a copy of as many
bytes between tensors in memory, with the threads of PyTorch: what a commit of a whole checkpoint has to do at least.
The changes that are written into the old file are positions and values in a file of their own, without compression.
"""

Figures = Mapping[str, list[float]]


def updates_section(result: Mapping[str, Any]) -> Iterator[str]:
    yield from machine_lines(result, result["rounds"])
    yield INTRODUCTION
    facts, sizes = result["workload"], result["delta_bytes"]
    deltas = ", ".join(f"{encoding} {size(sizes[encoding])}" for encoding in ENCODINGS)
    yield f"{size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']}). Deltas: {deltas}.\n"
    measured = {state: _by_method(result, state) for state in STATES}
    yield "### Goals\n"
    yield from table(["goal", "fst", "bound", "verdict"], [goal.row for goal in _goals(measured, result["rounds"])])
    for titles, what in ((UPDATE_TITLES, "Updates"), (DELTA_TITLES, "Deltas made")):
        for state, methods in measured.items():
            if rows := [_row(title, methods[method]) for method, title in titles.items() if method in methods]:
                yield f"### {what}, {STATES[state]}\n"
                yield from table(["", "seconds", "cannot serve", "extra memory", "CPU", "from the disk"], rows)


def _by_method(result: Mapping[str, Any], state: str) -> Mapping[str, Figures]:
    """Returns the values of all rounds by method and figure."""
    methods: dict[str, dict[str, list[float]]] = {}
    for entry in result["measurements"]:
        if entry["state"] == state:
            figures = methods.setdefault(entry["method"], {})
            for key in entry.keys() - {"method", "state"}:
                figures.setdefault(key, []).append(entry[key])
    return methods


def _goals(measured: Mapping[str, Mapping[str, Figures]], rounds: int) -> Iterator[Goal]:
    def ratio(state: str, key: str, own: str, other: str) -> float | None:
        methods = measured[state]
        if own not in methods or other not in methods:
            return None
        part, whole = (statistics.median(methods[method][key]) for method in (own, other))
        return part / whole if whole else None

    for state, title in STATES.items():
        text = f"Update, {title}: time of the commit, of that of a copy in memory"
        yield Goal(text, ratio(state, "blocked_seconds", "update", "copy"), COPY_SHARE, quotient, rounds=rounds)
    for encoding in ENCODINGS:
        for other, name, bound in (
            ("load-state-dict", "a load of the whole checkpoint", RELOAD_SHARE),
            ("patch", "a patched file that is loaded", PATCH_SHARE),
        ):
            for key, what in (("storage_bytes", "bytes read"), ("seconds", "time"), ("cpu_seconds", "CPU time")):
                text = f"Delta, {encoding}, cold page cache: {what}, of {name}"
                yield Goal(text, ratio("cold", key, f"delta-{encoding}", other), bound, share, rounds=rounds)
        for state, title in STATES.items():
            text = f"Delta made, {encoding}, {title}: of the rate of reading both checkpoints"
            rate = ratio(state, "seconds", "read-both", f"make-{encoding}")
            yield Goal(text, rate, READ_SHARE, share, at_least=True, rounds=rounds)


def _row(title: str, figures: Figures) -> list[str]:
    columns: dict[str, Callable[[float], str]] = {
        "seconds": seconds,
        "blocked_seconds": seconds,
        "extra_bytes": size,
        "cpu_seconds": seconds,
        "storage_bytes": size,
    }
    return [title, *(_spread(figures[key], show) for key, show in columns.items())]


def _spread(values: list[float], show: Callable[[float], str]) -> str:
    # A measured peak may be a little below the one before.
    median = show(max(0.0, statistics.median(values)))
    return median if show is size else f"{median} [{show(min(values))} .. {show(max(values))}]"
