"""Chart of the host's part of loads to a GPU, from the output of `make bench-feed`."""

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .chart import LABEL, OTHER, OWN, WIDTH_INCHES, number
from .directories import TMPFS

SECTION = re.compile(r"gpu_feed -- bytes (\S+)(.*?)(?=^cargo |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^ *(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", re.MULTILINE)
# Default of FST_CHUNK_BYTES on a GPU, in KiB. The chart has the best number of slots.
CHUNK_KIB = 4096
# Columns of the rows, with labels and colors.
DIRECT = 4
BARS = ((DIRECT, "fst, direct reads", OWN), (3, "fst, page cache", OWN), (2, "memcpy", OTHER))


def draw_feed(text: str, folder: Path) -> None:
    """Writes bench-feed.png, if the text has rates of this chunk size: a panel for each directory."""
    sections = {}
    for directory, lines in SECTION.findall(text):
        rows = [row for row in ROW.findall(lines) if int(row[0]) == CHUNK_KIB]
        if rows:
            sections[directory] = rows
    if not sections:
        return
    picture = Figure(figsize=(WIDTH_INCHES, 2.0), layout="constrained")
    title = "What one second of CPU time feeds to a GPU: more is better"
    picture.suptitle(title, fontsize=11, fontweight="bold")
    axes = picture.subplots(1, len(sections), squeeze=False, sharey=True)[0]
    for axis, (directory, rows) in zip(axes, sections.items(), strict=True):
        _panel(axis, directory, rows)
    picture.savefig(folder / "bench-feed.png", dpi=150, metadata={"Software": None})


def _panel(axis: Axes, directory: str, rows: list[tuple[str, ...]]) -> None:
    for position, (column, _, color) in enumerate(BARS):
        if column == DIRECT and directory == str(TMPFS):
            axis.text(0, position, "  tmpfs has no direct reads", va="center", fontsize=7.5, style="italic")
            continue
        best = max(float(row[column]) for row in rows)
        axis.barh(position, best, color=color, height=0.72)
        axis.annotate(number(best), (best, position), **LABEL)
    axis.set_yticks(range(len(BARS)), [label for _, label, _ in BARS], fontsize=8)
    axis.set_ylim(len(BARS) - 0.4, -0.6)
    axis.margins(x=0.16)
    axis.set_title(f"Files in {directory}, chunks of {CHUNK_KIB // 1024} MiB", fontsize=9.5, loc="left")
    axis.set_xlabel("GB; a driver without work in place of the GPU", fontsize=8.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
