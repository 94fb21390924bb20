"""Tables of text."""

import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate

from fst._profile.formatting import visible

_GAP = "  "
# Smallest width to which a column is cut, and the largest to which a long cell stretches it where lines may be longer
# than the terminal.
_WIDTH_MIN = 12
_WIDTH_MAX = 60


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), flexible: Sequence[int] = ()) -> str:
    """Aligns columns of text: those with an index in `right` to the right, the others to the left.

    On a terminal, the cells of the columns with an index in `flexible` are cut in the middle where a line would be
    longer than the terminal, as far as different cells stay different. Elsewhere they are complete, for other programs.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    if columns := _terminal_columns():
        _shrink(widths, flexible, columns)
        for index in flexible:
            cells = {row[index] for row in rows}
            # Trees indent equal names.
            count = len({cell.strip() for cell in cells})
            while len({_cut(cell, widths[index]) for cell in cells}) < count:
                widths[index] += 1
        rows = [[_cut(cell, widths[index]) for index, cell in enumerate(row)] for row in rows]
    else:
        for index in flexible:
            widths[index] = min(widths[index], _WIDTH_MAX)

    def line(row: Sequence[str]) -> str:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            cells.append(space + cell if index in right else cell + space)
        return _GAP.join(cells).rstrip()

    return "\n".join(map(line, rows))


def fit(text: str) -> str:
    """Returns a line of text. On a terminal, its middle is cut if it is longer than the terminal."""
    line = visible(text)
    return _cut(line, _terminal_columns() or _width(line))


def _terminal_columns() -> int:
    """Returns the width of the terminal, which COLUMNS may set, or 0 if the output is not a terminal."""
    return shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0


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
    if _width(text) <= width:
        return text
    kept = width - len("...")
    begin = _beginning(text, kept // 2)
    end = _beginning(text[::-1], kept - kept // 2)[::-1]
    return f"{begin}...{end}"


def _beginning(text: str, width: int) -> str:
    """Returns the longest beginning of a text that fits into `width`."""
    for length, total in enumerate(accumulate(map(_width_of_character, text))):
        if total > width:
            return text[:length]
    return text


def _width(text: str) -> int:
    """Returns the number of columns that a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_width_of_character, text))


def _width_of_character(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
