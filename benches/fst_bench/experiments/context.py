"""Amount of work of the experiments, their driver, and their rows."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .driver import Driver

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Context:
    """Work of an experiment: `total_bytes` that each measurement copies, how often it is repeated, the device, the
    folder of the files that are loaded, and the time limit."""

    library: str
    total_bytes: int
    repeats: int
    device: str
    files: Path
    limit_seconds: float
    begin: float = field(default_factory=time.monotonic)

    def has_time(self, seconds: float) -> bool:
        """Returns whether this number of seconds, and a tenth of the limit for the end, are left."""
        return time.monotonic() - self.begin + seconds < 0.9 * self.limit_seconds

    @cached_property
    def driver(self) -> Driver:
        """The driver. Raises DriverError without one."""
        return Driver(self.library)

    def times(self, work: Callable[[], object], scale: float) -> list[float]:
        """Returns the time of each repetition of `work`, in units of which a second has this many."""
        return [seconds(work) * scale for _ in range(self.repeats)]


# Figures of an experiment: what they are of, their unit, and the name of the parameter in `benches/h100.toml`.
Rows = Iterator[Mapping[str, Any]]


def row(what: str, values: list[float], unit: str = "", parameter: str = "") -> dict[str, Any]:
    return {"what": what, "values": values, "unit": unit, "parameter": parameter}


def on_threads(count: int, work: Callable[[], None]) -> None:
    """Runs `work` on this number of threads, waits for all of them, and raises the first error."""
    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(work) for _ in range(count)]:
            running.result()


def seconds(work: Callable[[], object]) -> float:
    """Returns the time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
