"""Tables of text."""

import shutil
from collections.abc import Iterable, Sequence

from fst._core.formatting import visible

_GAP = "  "
# Smallest width to which a column is cut, and the largest to which a long cell stretches it where lines may be longer
# than the terminal.
_WIDTH_MIN = 12
_WIDTH_MAX = 60


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), flexible: Sequence[int] = ()) -> str:
    """Aligns columns of text: those with an index in `right` to the right, the others to the left.

    On a terminal, the cells of the columns with an index in `flexible` are cut in the middle where a line would be
    longer than the terminal. Elsewhere they are complete, for other programs.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # 0 if the output is not a terminal and COLUMNS is not set.
    columns = shutil.get_terminal_size((0, 0)).columns
    if columns:
        _shrink(widths, flexible, columns)
        rows = [[_cut(cell, widths[index]) for index, cell in enumerate(row)] for row in rows]
    else:
        for index in flexible:
            widths[index] = min(widths[index], _WIDTH_MAX)

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return _GAP.join(cells).rstrip()

    return "\n".join(map(line, rows))


def _shrink(widths: list[int], flexible: Sequence[int], columns: int) -> None:
    """Reduces the widest of the flexible columns until a line fits into `columns`, or all have their smallest width."""
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - columns
    while excess > 0 and flexible:
        widest = max(flexible, key=lambda index: widths[index])
        if widths[widest] <= _WIDTH_MIN:
            return
        widths[widest] -= 1
        excess -= 1


def _cut(text: str, width: int) -> str:
    """Replaces the middle of a text by dots, so that it fits into `width`."""
    if len(text) <= width:
        return text
    kept = width - len("...")
    return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"
