"""Experiments and their results."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from .driver import Driver, DriverError


@dataclass(frozen=True)
class Settings:
    """How much an experiment does: of `total_bytes` copied by each measurement, and how often it is repeated."""

    total_bytes: int
    repeats: int
    device: str


@dataclass(frozen=True)
class Row:
    """Figure of an experiment. `parameter` is its name in `benches/h100.toml` if the timed driver uses it."""

    what: str
    values: tuple[float, ...]
    unit: str
    parameter: str = ""

    @property
    def median(self) -> float:
        return median(self.values)


Rows = Iterator[Row]


@dataclass(frozen=True)
class Experiment:
    """Experiment, with the decision that its rows drive."""

    name: str
    decides: str
    run: Callable[[Driver | None, Settings], Rows]


def needed(driver: Driver | None) -> Driver:
    """Returns the driver.

    Raises:
        DriverError: there is none.
    """
    if driver is None:
        raise DriverError("needs the CUDA driver")
    return driver


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
