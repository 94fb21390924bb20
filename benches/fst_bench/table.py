"""Tables of measurements in reports."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import text
from .result import CPU_OF_GB, RAW_SHARE, Figure, Name, Run


class Column(NamedTuple):
    """Column of a table: its head, the key of its figure, and the format of the figure."""

    head: str
    key: str
    show: Callable[[Figure], str]


def of_median(show: Callable[[float], str]) -> Callable[[Figure], str]:
    """Returns the format of a figure that shows its median. A measured peak may be a little below the one before."""
    return lambda figure: show(max(0.0, figure.median))


def rate_of(size_bytes: int) -> Callable[[Figure], str]:
    return lambda figure: text.rate(size_bytes / figure.median)


def share_of(size_bytes: int, ceiling: Figure) -> Callable[[Figure], str]:
    return lambda figure: text.share(size_bytes / figure.median / ceiling.median)


def size_of(whole_bytes: int) -> Callable[[Figure], str]:
    return lambda figure: f"{text.size(figure.median)}, {text.quotient(figure.median / whole_bytes)}"


size, seconds = of_median(text.size), of_median(text.seconds)
TIMES = (
    Column("load", "load_seconds", text.spread),
    Column("second load", "second_load_seconds", text.spread),
    Column("load + read", "load_and_read_seconds", text.spread),
)
CPU = Column("CPU of 1 GB", CPU_OF_GB, seconds)
RAW = Column(
    "of a raw read",
    RAW_SHARE,
    lambda raw: f"{text.share(raw.median)} [{text.share(raw.low)} .. {text.share(raw.high)}]",
)


def comparison(
    run: Run, heads: Sequence[str], rows: Iterable[tuple[Sequence[str], Name]], columns: Sequence[Column]
) -> Iterator[str]:
    """Yields a table with a row for each case, and the reasons why cases have no figures.

    Each row begins with its titles. Columns that no row fills are left out.
    """
    lines, reasons = [], []
    for titles, name in rows:
        figures = [(run.figure(name, key), show) for _, key, show in columns]
        row = [show(figure) if figure else "" for figure, show in figures]
        lines.append([*titles, *row])
        if not any(row):
            reasons.append(f"- {titles[0]}: {run.reason(name)}.")
    if not lines:
        return
    filled = [any(texts) for texts in zip(*lines, strict=True)]
    whole = [[*heads, *(column.head for column in columns)], *([cell or "-" for cell in line] for line in lines)]
    head, *body = ([cell for cell, keep in zip(line, filled, strict=True) if keep] for line in whole)
    yield from text.table(head, body)
    if reasons:
        yield "\n".join(reasons) + "\n"


def described(facts: Mapping[str, Any]) -> str:
    """Returns the size of a checkpoint and its model in a sentence."""
    return f"{text.size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']})."
