"""Raw results of a suite, and figures derived from them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# Rate of a raw read of another file just before a measurement of cold files.
RAW_RATE = "raw_bytes_per_second"
# Rate of a measurement, in reading every byte, as a share of a raw read of another file just before it.
RAW_SHARE = "share_of_raw_read"
# CPU seconds of a process, in loading and reading every byte, for 1 GB of tensors.
CPU_OF_GB = "cpu_seconds_per_gb"
# All fields that name cases.
FIELDS = ("workload", "action", "layout", "ranks", "state", "peer", "method", "library", "name")

# Some fields of the name of a case, which stand for all cases that have them.
Name = Mapping[str, Any]


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
    """Results of one run of a suite, on one device."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.device: str = facts["device"]
        self.workloads: dict[str, dict[str, Any]] = facts["workloads"]
        self.entries: list[dict[str, Any]] = facts["measurements"]

    @classmethod
    def read(cls, path: Path) -> "Run":
        return cls(json.loads(path.read_text()))

    def some(self, name: Name) -> list[dict[str, Any]]:
        """Returns the measurements that have these fields."""
        return [entry for entry in self.entries if name.items() <= entry.items()]

    def names(self, *fields: str, **name: Any) -> list[dict[str, Any]]:
        """Returns the different values of some fields, in the order of measurement."""
        entries = [entry for entry in self.some(name) if all(field in entry for field in fields)]
        return [dict(items) for items in dict.fromkeys(tuple((field, e[field]) for field in fields) for e in entries)]

    def figure(self, name: Name, key: str) -> Figure | None:
        """Returns the figure `key` of a case, or None if it was not measured or failed in any round."""
        entries = self.some(name)
        return None if any(key not in entry for entry in entries) else Figure.of([entry[key] for entry in entries])

    def median(self, name: Name, key: str) -> float | None:
        figure = self.figure(name, key)
        return figure.median if figure else None

    def values(self, name: Name, key: str) -> list[float]:
        """Returns the values of `key` in all measurements that have these fields and `key`."""
        return [entry[key] for entry in self.some(name) if key in entry]

    def largest(self, name: Name, key: str) -> float | None:
        return max(self.values(name, key), default=None)

    def rounds(self) -> str:
        """Returns the number of rounds of the medians, such as "3" or "2 to 3"."""
        measured = (entry for entry in self.entries if not reason_of(entry))
        counts = Counter(tuple(entry.get(field) for field in FIELDS) for entry in measured).values()
        return " to ".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))

    def text(self, name: Name, key: str) -> str:
        return next((entry[key] for entry in self.some(name) if key in entry), "")

    def reason(self, name: Name) -> str:
        """Returns the reason why a case has no figure."""
        return next(filter(None, map(reason_of, self.some(name))), "not measured")

    def ceiling(self, name: str) -> Figure | None:
        """Returns a rate of the hardware, in bytes per second."""
        entries = [entry for entry in self.facts["ceilings"] if entry["name"] == name]
        return Figure.of([entry["bytes_per_second"] for entry in entries if "bytes_per_second" in entry])

    def rate(self, ceiling: str) -> float | None:
        figure = self.ceiling(ceiling)
        return figure.median if figure else None

    def ceilings(self) -> dict[str, str]:
        """Returns the names of the ceilings, each with its method or the reason why it is missing."""
        methods: dict[str, str] = {}
        for entry in self.facts["ceilings"]:
            methods.setdefault(entry["name"], entry.get("how") or reason_of(entry))
        return methods


def reason_of(row: Mapping[str, Any]) -> str:
    """Returns the reason why a measurement has no figures, or nothing."""
    return row.get("failed") or row.get("unavailable") or ""
