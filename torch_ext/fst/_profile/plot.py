"""Plots a recording."""

import os
import textwrap
from typing import TYPE_CHECKING

from fst._profile.stages import Stage
from fst._profile.trace import Recording, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue for files, green for host memory, orange and red for the GPU, gray for waiting. Saves have the darker shades.
COLORS: dict[Stage, str] = {
    "load": "#444444",
    "open": "#9467bd",
    "header": "#c5b0d5",
    "plan": "#8c564b",
    "map": "#17becf",
    "read ahead": "#9edae5",
    "slot": "#d9d9d9",
    "allocate": "#bcbd22",
    "pin": "#dbdb8d",
    "read": "#1f77b4",
    "hash": "#e7969c",
    "cipher": "#de9ed6",
    "place": "#2ca02c",
    "cast": "#98df8a",
    "queue": "#e377c2",
    "copy": "#ff7f0e",
    "kernel": "#d62728",
    "wait": "#b0b0b0",
    "save": "#000000",
    "gather": "#145214",
    "write": "#0b3c5d",
    "flush": "#4b2e83",
}
_RATES: dict[Stage, str] = {
    "read": "read from files",
    "hash": "hashed on the CPU",
    "cipher": "encrypted or decrypted on the CPU",
    "cast": "cast on the CPU",
    "place": "copied on the CPU",
    "copy": "copied to or from the GPU",
    "gather": "gathered on the CPU",
    "write": "written to files",
}
_BINS = 100
_MILLISECONDS_BELOW = 0.5
_TITLE_COLUMNS = 110


def plot(recording: Recording, title: str, path: str | os.PathLike[str]) -> None:
    """Writes a timeline of all rows, and below it the transfer rates."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plotting a profile requires matplotlib; pip install matplotlib") from error
    rows = sorted({span.row for span in recording.spans})
    moving = {stage: spans for stage in _RATES if (spans := _moving(recording, stage))}
    # A panel for the timeline, and one for the rates if there are any.
    panels = [1 + 0.28 * len(rows), 2][: 2 if moving else 1]
    figure = Figure(figsize=(12, 1.5 + sum(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=panels)[:, 0]
    figure.suptitle(textwrap.fill(title, _TITLE_COLUMNS), fontsize=12)
    _draw_timeline(axes[0], recording, rows)
    if moving:
        _draw_rates(axes[1], recording, moving)
    axes[-1].set_xlim(left=0)
    short = max((span.end_seconds for span in recording.spans), default=1.0) < _MILLISECONDS_BELOW
    if short:
        axes[-1].xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    axes[-1].set_xlabel(f"{'milliseconds' if short else 'seconds'} since the profile began")
    figure.savefig(path, dpi=120)


def _moving(recording: Recording, stage: Stage) -> list[Span]:
    return [span for span in recording.spans_of(stage) if span.bytes and span.end_seconds > span.begin_seconds]


def _draw_timeline(axes: "Axes", recording: Recording, rows: list[tuple[int, int]]) -> None:
    heights = {row: -index for index, row in enumerate(rows)}
    for stage in recording.stages:
        bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for span, (begin, end) in recording.self_intervals(stage):
            bars.setdefault(span.row, []).append((begin, end - begin))
        for index, (row, spans) in enumerate(bars.items()):
            label = stage if index == 0 else None
            axes.broken_barh(spans, (heights[row] - 0.4, 0.8), color=COLORS[stage], linewidth=0, label=label)
    axes.set_yticks([-index for index in range(len(rows))], [recording.row_names[row] for row in rows], fontsize=8)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_title("stages of each thread and GPU", fontsize=10, loc="left")
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _draw_rates(axes: "Axes", recording: Recording, moving: dict[Stage, list[Span]]) -> None:
    import numpy

    end = max((span.end_seconds for span in recording.spans), default=1.0)
    edges = numpy.linspace(0.0, end, _BINS + 1)
    for stage, spans in moving.items():
        # Bytes moved before each edge, at a constant rate within each span.
        moved = numpy.zeros(_BINS + 1)
        for span in spans:
            moved += span.bytes * numpy.clip(
                (edges - span.begin_seconds) / (span.end_seconds - span.begin_seconds), 0.0, 1.0
            )
        axes.stairs(numpy.diff(moved) / numpy.diff(edges) / 1e9, edges, color=COLORS[stage], label=_RATES[stage])
    axes.set_title("rate", fontsize=10, loc="left")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
