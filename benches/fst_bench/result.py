"""Raw results of a run, and figures derived from them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .cell import ACTIONS, STATES, Cell, GroupCell
from .peer import PEERS

# Rate of a raw read of another file just before a measurement of cold files.
RAW_RATE = "raw_bytes_per_second"
# Share of a measurement's rate, in reading every byte, of that of a raw read of another file just before it.
RAW_SHARE = "share_of_raw_read"
# CPU seconds of a process, in loading and reading every byte, for 1 GB of tensors.
CPU_OF_GB = "cpu_seconds_per_gb"


@dataclass(frozen=True)
class Figure:
    """Median of several rounds, with the minimum, the maximum and the quartiles."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure | None":
        """Returns the figure of a value for each round, or None if there are none."""
        if not values:
            return None
        lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
        return cls(median(values), min(values), max(values), (lower, upper), len(values))

    def map(self, convert: Callable[[float], float]) -> "Figure":
        """Returns the figure in another unit. `convert` rises or falls everywhere."""
        low, high = sorted(map(convert, (self.low, self.high)))
        lower, upper = sorted(map(convert, self.quartiles))
        return Figure(convert(self.median), low, high, (lower, upper), self.rounds)

    def overlaps(self, other: "Figure") -> bool:
        """Returns whether the middle halves of both overlap, so that their medians may differ by chance."""
        return self.quartiles[0] <= other.quartiles[1] and other.quartiles[0] <= self.quartiles[1]


class Run:
    """Results of one run on one device."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Any] = json.loads(path.read_text())
        self.device: str = self.facts["device"]
        self.workloads: dict[str, dict[str, Any]] = self.facts["workloads"]

    def tables(self) -> Iterator[tuple[str, str, str]]:
        """Returns workload, action and state of every table, in the order of measurement."""
        measured = {(entry["workload"], entry["action"], entry["state"]) for entry in self._measurements()}
        tables = product(self.workloads, ACTIONS, STATES)
        yield from (table for table in tables if table in measured)

    def peers(self) -> list[str]:
        seen = {entry["peer"] for entry in self._measurements()}
        return [name for name in PEERS if name in seen]

    def figure(self, cell: Cell | GroupCell, key: str) -> Figure | None:
        """Returns the figure `key` of a cell, or None if it was not measured or failed in any round."""
        entries = self._entries(cell)
        return None if any(key not in entry for entry in entries) else Figure.of([entry[key] for entry in entries])

    def largest(self, peer: str, key: str) -> float | None:
        """Returns the largest value of `key` in all measurements of a peer."""
        return max(
            (entry[key] for entry in self._measurements() if entry["peer"] == peer and key in entry), default=None
        )

    def median(self, peer: str, key: str) -> float | None:
        """Returns the median of `key` over all measurements of a peer."""
        figure = Figure.of([entry[key] for entry in self._measurements() if entry["peer"] == peer and key in entry])
        return figure.median if figure else None

    def measured(self, cell: Cell) -> bool:
        """Returns whether a cell was measured or refused."""
        return bool(self._entries(cell))

    def groups(self) -> list[GroupCell]:
        """Returns the cells of several ranks, in the order of measurement."""
        keys = ("layout", "ranks", "state", "peer")
        entries = (entry for entry in self._measurements() if "layout" in entry)
        return list(dict.fromkeys(GroupCell(*(entry[key] for key in keys)) for entry in entries))

    def rounds(self) -> str:
        """Returns the number of rounds of the medians, such as "3" or "2 to 3"."""
        keys = ("workload", "action", "layout", "ranks", "state", "peer")
        done = {"load_seconds", "save_seconds"}
        loads = (entry for entry in self._measurements() if done & entry.keys())
        counts = Counter(tuple(entry.get(key) for key in keys) for entry in loads).values()
        return " to ".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))

    def text(self, cell: Cell | GroupCell, key: str) -> str:
        return next((entry[key] for entry in self._entries(cell) if key in entry), "")

    def reason(self, cell: Cell | GroupCell) -> str:
        """Returns the reason why a cell has no figure."""
        entries = self._entries(cell)
        reasons = [entry.get("failed") or entry.get("unavailable") for entry in entries]
        return next((reason for reason in reasons if reason), "not measured")

    def ceiling(self, name: str) -> Figure | None:
        """Returns a rate of the hardware, in bytes per second."""
        entries = [entry for entry in self.facts["ceilings"] if entry["name"] == name]
        return Figure.of([entry["bytes_per_second"] for entry in entries if "bytes_per_second" in entry])

    def ceilings(self) -> dict[str, str]:
        """Returns the names of the ceilings, each with its method or the reason why it is missing."""
        methods: dict[str, str] = {}
        for entry in self.facts["ceilings"]:
            methods.setdefault(entry["name"], entry.get("how") or entry.get("unavailable") or entry.get("failed", ""))
        return methods

    def _measurements(self) -> list[dict[str, Any]]:
        measurements: list[dict[str, Any]] = self.facts["measurements"]
        return measurements

    def _entries(self, cell: Cell | GroupCell) -> list[dict[str, Any]]:
        fields = vars(cell).items()
        return [entry for entry in self._measurements() if fields <= entry.items()]
