"""How the command writes numbers and tables for people."""

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(size_bytes: float) -> str:
    """A size in the unit that fits: "1.5 GiB"."""
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:.0f} B" if unit == 0 else f"{size_bytes:.1f} {_UNITS[unit]}"


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lines with aligned columns; those numbered in `right` are aligned to the right."""
    kept = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]

    def line(row: list[str]) -> str:
        cells = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, kept))


def count(number: int, what: str) -> str:
    """A number of things: "1 file", "2,000 tensors"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
