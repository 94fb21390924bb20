"""The raw results of one run, and the figures that are drawn from them."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from .cell import ACTIONS, STATES, Cell, GroupCell
from .peer import PEERS


@dataclass(frozen=True)
class Figure:
    """The median of several rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float
    rounds: int


class Run:
    """What one run of the bench measured on one device."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Any] = json.loads(path.read_text())
        self.device: str = self.facts["device"]
        self.workloads: dict[str, dict[str, Any]] = self.facts["workloads"]

    def tables(self) -> Iterator[tuple[str, str, str]]:
        """Workload, action and state of every table, in the order they were measured."""
        measured = {(entry["workload"], entry["action"], entry["state"]) for entry in self._measurements()}
        tables = product(self.workloads, ACTIONS, STATES)
        yield from (table for table in tables if table in measured)

    def peers(self) -> list[str]:
        seen = {entry["peer"] for entry in self._measurements()}
        return [name for name in PEERS if name in seen]

    def figure(self, cell: Cell | GroupCell, key: str) -> Figure | None:
        """The figure `key` of a cell, or None if it could not be measured or went wrong in any round."""
        entries = self._entries(cell)
        return None if any(key not in entry for entry in entries) else _figure([entry[key] for entry in entries])

    def largest(self, peer: str, key: str) -> float | None:
        """The largest value of `key` in any measurement of a peer."""
        return max(
            (entry[key] for entry in self._measurements() if entry["peer"] == peer and key in entry), default=None
        )

    def median(self, peer: str, key: str) -> float | None:
        """The median of `key` over all measurements of a peer."""
        figure = _figure([entry[key] for entry in self._measurements() if entry["peer"] == peer and key in entry])
        return figure.median if figure else None

    def rounds(self) -> str:
        """How many rounds the medians are of, such as "3" or "2 to 3"."""
        keys = ("workload", "action", "layout", "ranks", "state", "peer")
        done = {"load_seconds", "save_seconds"}
        loads = (entry for entry in self._measurements() if done & entry.keys())
        counts = Counter(tuple(entry.get(key) for key in keys) for entry in loads).values()
        return " to ".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))

    def text(self, cell: Cell | GroupCell, key: str) -> str:
        return next((entry[key] for entry in self._entries(cell) if key in entry), "")

    def reason(self, cell: Cell | GroupCell) -> str:
        """Why a cell has no figure."""
        entries = self._entries(cell)
        reasons = [entry.get("failed") or entry.get("unavailable") for entry in entries]
        return next((reason for reason in reasons if reason), "not measured")

    def ceiling(self, name: str) -> Figure | None:
        """A rate of the hardware in bytes per second."""
        entries = [entry for entry in self.facts["ceilings"] if entry["name"] == name]
        return _figure([entry["bytes_per_second"] for entry in entries if "bytes_per_second" in entry])

    def ceilings(self) -> dict[str, str]:
        """Names of the ceilings, with how each was measured or why it was not."""
        told: dict[str, str] = {}
        for entry in self.facts["ceilings"]:
            told.setdefault(entry["name"], entry.get("how") or entry.get("unavailable") or entry.get("failed", ""))
        return told

    def disk(self) -> str:
        """The ceiling that says what the disk can do: fio where it was there, else direct reads of our own."""
        return "fio" if self.ceiling("fio") else "direct-reads"

    def _measurements(self) -> list[dict[str, Any]]:
        measurements: list[dict[str, Any]] = self.facts["measurements"]
        return measurements

    def _entries(self, cell: Cell | GroupCell) -> list[dict[str, Any]]:
        wanted = vars(cell).items()
        return [entry for entry in self._measurements() if wanted <= entry.items()]


def _figure(values: list[float]) -> Figure | None:
    return Figure(median(values), min(values), max(values), len(values)) if values else None
