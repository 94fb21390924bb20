"""Formats of figures: sizes in MiB and GiB, rates in GB/s (10^9 bytes), times in ms and s."""

from collections.abc import Iterator, Sequence

from .result import Figure

GIB = 1 << 30
MIB = 1 << 20
MILLISECONDS_BELOW = 0.5


def seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < MILLISECONDS_BELOW else f"{value:.2f} s"


def microseconds(value: float) -> str:
    return f"{value * 1e6:.2f} us"


def size(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def quotient(value: float) -> str:
    return f"{value:.2f}"


def share(value: float) -> str:
    return f"{value:.1%}"


def spread(figure: Figure) -> str:
    """Formats the median with its unit, then the minimum and maximum in the same unit."""
    factor = 1e3 if figure.median < MILLISECONDS_BELOW else 1.0
    return f"{seconds(figure.median)} [{figure.low * factor:.2f} .. {figure.high * factor:.2f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table and an empty line."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""
