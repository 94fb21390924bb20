"""Tables of text."""

from collections.abc import Iterable, Sequence

from fst._core.formatting import visible


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligns columns of text: those with an index in `right` to the right, the others to the left."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
