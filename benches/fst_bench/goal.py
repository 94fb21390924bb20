"""Performance goals of fst, and whether a run met them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from . import text
from .peer import PEERS
from .result import RAW_SHARE, Figure, Name, Run

ROUNDS_MIN = 7  # of a comparison that is a claim


@dataclass(frozen=True)
class Goal:
    """Goal: `measured` must be at most, or at least, `bound`. Both are None if they were not measured.

    If `overlaps`, `bound` is the figure of the library `other`, or a quotient with it, and both differ less than each
    varies. `rounds` is the number of rounds of a comparison with other libraries.
    """

    text: str
    measured: float | None
    bound: float | None
    show: Callable[[float], str]
    at_least: bool = False
    overlaps: bool = False
    rounds: int = ROUNDS_MIN
    other: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None or self.bound is None:
            return "not measured here: not in this run"
        kept = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        verdict = "equal" if self.overlaps else "met" if kept else "**missed**"
        return verdict if self.rounds >= ROUNDS_MIN else f"{verdict}, rounds: {self.rounds}"

    @property
    def row(self) -> list[str]:
        bound = "-" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.show(self.bound)}"
        other = f", {self.other}" if self.other else ""
        return [self.text, "-" if self.measured is None else self.show(self.measured), bound + other, self.verdict]


# Goal of a share of a rate.
at_least = partial(Goal, show=text.share, at_least=True)


def quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def load_rate(run: Run, cell: Name, key: str = "load_seconds") -> float | None:
    seconds = run.median(cell, key)
    return run.workloads[cell["workload"]]["bytes"] / seconds if seconds else None


def compared(run: Run, title: str, own: Name, others: Sequence[Name], key: str) -> Goal:
    """Returns the goal that fst is at least as fast as the fastest of the others.

    If a raw read was measured beside each load, rates are compared as shares of it, because the rate of the disk itself
    changes from one minute to the next.
    """
    shared = run.figure(own, RAW_SHARE) is not None
    key, pick = (RAW_SHARE, max) if shared else (key, min)
    figures = [(figure, cell) for cell in others if (figure := run.figure(cell, key))]
    best, theirs = pick(figures, key=lambda pair: pair[0].median, default=(None, {}))
    mine, other = run.figure(own, key), theirs.get("peer") or theirs.get("library", "")
    return Goal(
        title + (", as a share of a raw read" if shared else ""),
        mine.median if mine else None,
        best.median if best else None,
        text.share if shared else text.seconds,
        at_least=shared,
        overlaps=mine is not None and best is not None and mine.overlaps(best),
        rounds=_rounds(mine, best),
        other=PEERS[other].title if other in PEERS else other,
    )


def ratio(
    run: Run,
    title: str,
    cells: tuple[Name, Name],
    key: str,
    bound: float,
    show: Callable[[float], str] = text.quotient,
    at_least: bool = False,
) -> Goal:
    """Returns the goal of the median of the first case, divided by the second case's median."""
    one, other = (run.figure(cell, key) for cell in cells)
    value = quotient(one.median, other.median) if one and other else None
    return Goal(title, value, bound, show, at_least, rounds=_rounds(one, other))


def _rounds(*figures: Figure | None) -> int:
    return min(figure.rounds if figure else 0 for figure in figures)
