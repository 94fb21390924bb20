"""Charts of the README and of docs/benchmarking.md: rates of the large loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from .ceiling import DISK
from .peer import PEERS
from .peer_suite import Cell, cell
from .result import RAW_RATE, Figure, Run

# Blue, grey and orange can be told apart with any kind of colour blindness, and in print.
OWN, OTHER, LIMIT = "#0072b2", "#b3b3b3", "#d55e00"
WIDTH_INCHES = 9.0
BAR_INCHES = 0.22
# A ceiling is drawn if it is at most this many times the longest bar, so that bars stay readable.
SCALE_MAX = 2.5
DEVICE_TITLES = {"cpu": "to the CPU", "cuda": "to a GPU from a warm page cache"}


class Panel(NamedTuple):
    """Panel of a chart: all libraries in loads of a workload from one state of its files, by one time of theirs."""

    workload: str
    state: str
    time: str
    title: str

    def cell(self, peer: str) -> Cell:
        return cell(self.workload, "load", self.state, peer)


# A load to the CPU may only have mapped the file; a load to a GPU has moved all of it.
READ, FIRST, SECOND = "load_and_read_seconds", "load_seconds", "second_load_seconds"
PANELS = {
    "cpu": (
        Panel("dense", "warm", READ, "Dense, warm page cache"),
        Panel("dense", "cold", READ, "Dense, cold page cache"),
        Panel("moe", "warm", READ, "Mixture of experts, warm page cache"),
        Panel("moe", "tmpfs", READ, "Mixture of experts, tmpfs"),
    ),
    "cuda": (
        Panel("dense", "warm", FIRST, "Dense, first load of a process"),
        Panel("dense", "warm", SECOND, "Dense, second load of a process"),
        Panel("moe", "warm", FIRST, "Mixture of experts, first load of a process"),
        Panel("moe", "warm", SECOND, "Mixture of experts, second load of a process"),
    ),
}


def draw(runs: Mapping[str, Run], folder: Path) -> None:
    """Writes bench-DEVICE.png for each run."""
    for device in DEVICE_TITLES.keys() & runs.keys():
        run = runs[device]
        panels = [panel for panel in PANELS[device] if any(_rates(run, panel, peer) for peer in _peers(run))]
        if panels:
            _chart(run, panels).savefig(folder / f"bench-{device}.png", dpi=150, metadata={"Software": None})


def _chart(run: Run, panels: list[Panel]) -> Picture:
    # The two panels of a row have one workload, and the names of its libraries in common.
    rows = [panels[begin : begin + 2] for begin in range(0, len(panels), 2)]
    measured = [[peer for peer in _peers(run) if any(_rates(run, panel, peer) for panel in row)] for row in rows]
    heights = [0.9 + BAR_INCHES * len(peers) for peers in measured]
    # A bare Figure needs no display.
    picture = Picture(figsize=(WIDTH_INCHES, 0.4 + sum(heights)), layout="constrained")
    done = "load and read every byte" if run.device == "cpu" else "load"
    title = f"Rate to {done} {DEVICE_TITLES[run.device]}, {run.facts['date']}: more is better"
    picture.suptitle(title, fontsize=11, fontweight="bold")
    axes = picture.subplots(len(rows), 2, squeeze=False, sharey="row", height_ratios=heights)
    for row, peers, beside in zip(rows, measured, axes, strict=True):
        for axis in beside[len(row) :]:
            axis.axis("off")
        for axis, panel in zip(beside, row, strict=False):
            _draw(axis, run, panel, peers)
    return picture


def _peers(run: Run) -> list[str]:
    return [name for name in PEERS if run.some({"peer": name})]


def _rates(run: Run, panel: Panel, peer: str) -> Figure | None:
    """Returns the GB/s of a library, or None if it has no figure."""
    seconds = run.figure(panel.cell(peer), panel.time)
    return seconds and seconds.map(lambda value: run.workloads[panel.workload]["bytes"] / 1e9 / value)


def _draw(axis: Axes, run: Run, panel: Panel, peers: list[str]) -> None:
    figures = [_rates(run, panel, peer) for peer in peers]
    rates = [figure.median if figure else 0.0 for figure in figures]
    colors = [OWN if PEERS[peer].release is None else OTHER for peer in peers]
    bars = axis.barh(range(len(peers)), rates, color=colors, height=0.72)
    # The labels have a background, so that no line crosses them.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.bar_label(bars, [f"{rate:.3g}" if rate else "-" for rate in rates], padding=4, fontsize=8, zorder=5, bbox=box)
    axis.set_yticks(range(len(peers)), [PEERS[peer].title for peer in peers], fontsize=8)
    axis.set_ylim(len(peers) - 0.4, -0.6)
    axis.set_xlabel(f"GB/s{_mark_limit(axis, run, panel, max(rates))}", fontsize=8.5)
    axis.margins(x=0.16)
    axis.set_xlim(left=0)
    axis.set_title(panel.title, fontsize=9.5, loc="left")
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _mark_limit(axis: Axes, run: Run, panel: Panel, largest: float) -> str:
    """Marks the largest rate of the hardware in all rounds of the run, and returns its name for the label."""
    rates = []
    if panel.state == "cold":
        ceiling, name = DISK, "reading the disk"
        rates = run.values({}, RAW_RATE)
    elif run.device == "cpu":
        ceiling, name = "memory-read", "reading memory"
    else:
        ceiling, name = "pinned-to-device", "pinned copies"
    if figure := run.ceiling(ceiling):
        rates.append(figure.high)
    limit = max(rates, default=0.0) / 1e9
    # The rate of a disk changes from minute to minute. A rate that a load has exceeded is no ceiling.
    if not largest <= limit <= SCALE_MAX * largest:
        return ""
    axis.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=1.5)
    return f"; dashed: {name}, {limit:.3g}"
