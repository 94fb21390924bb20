"""Charts of the README: rates of the large loads, and times of the small ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from .cell import Cell
from .peer import PEERS
from .result import RAW_RATE, Figure, Run

# Blue, grey and orange can be told apart with any kind of colour blindness, and in print.
OWN, OTHER, LIMIT, SPREAD = "#0072b2", "#b3b3b3", "#d55e00", "#404040"
WIDTH_INCHES = 9.0
BAR_INCHES = 0.22
# A ceiling is drawn if it is at most this many times the longest bar, so that bars stay readable.
SCALE_MAX = 2.5
REASON_LENGTH = 48
# Labels of bars stand beside the bars, and have a background, so that no line crosses them.
LABEL: dict[str, Any] = {
    "xytext": (6, 0),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 8,
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6},
}
DEVICE_TITLES = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True)
class Panel:
    workload: str
    action: str
    state: str
    title: str

    def measured(self, run: Run) -> bool:
        return (self.workload, self.action, self.state) in set(run.tables())


RATES = (
    Panel("dense", "load", "warm", "Dense, warm page cache"),
    Panel("dense", "load", "cold", "Dense, cold page cache"),
    Panel("moe", "load", "warm", "Mixture of experts, warm page cache"),
    Panel("moe", "load", "tmpfs", "Mixture of experts, tmpfs"),
)
TIMES = (
    Panel("adapter", "load", "warm", "LoRA adapter, {size:.0f} MB in {tensors:,} tensors"),
    Panel("many", "select", "warm", "10 of {tensors:,} tensors by name"),
)


def number(value: float) -> str:
    """Returns three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(runs: Mapping[str, Run], folder: Path) -> None:
    """Writes bench-DEVICE.png and bench-small-DEVICE.png for each run."""
    for device in DEVICE_TITLES.keys() & runs.keys():
        _page(runs[device], RATES, _Rates, folder / f"bench-{device}.png")
        _page(runs[device], TIMES, _Times, folder / f"bench-small-{device}.png")


def _page(run: Run, panels: tuple[Panel, ...], kind: "type[_Bars]", path: Path) -> None:
    panels = tuple(panel for panel in panels if panel.measured(run))
    peers = [peer for peer in run.peers() if any(kind(run, panel).figure(peer) for panel in panels)]
    if not peers:
        return
    rows = -(-len(panels) // 2)
    # A bare Figure needs no display.
    picture = Picture(figsize=(WIDTH_INCHES, 0.4 + rows * (0.9 + BAR_INCHES * len(peers))), layout="constrained")
    done = "load and read every byte" if run.device == "cpu" else "load"
    picture.suptitle(kind.title.format(done=done, device=DEVICE_TITLES[run.device]), fontsize=11, fontweight="bold")
    axes = picture.subplots(rows, 2, squeeze=False, sharey=True)
    for axis, panel in zip(axes.flat, panels, strict=False):
        kind(run, panel).draw(axis, peers)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    picture.savefig(path, dpi=150, metadata={"Software": None})


class _Bars(ABC):
    """Panel of a chart: a bar for each library, with the spread of its rounds. `title` heads a page of such panels."""

    title: str

    def __init__(self, run: Run, panel: Panel) -> None:
        self._run = run
        self._panel = panel
        self._facts = run.workloads.get(panel.workload, {})
        # A load to the CPU may only have mapped the file; a load to a GPU has moved all of it.
        self._key = "load_and_read_seconds" if run.device == "cpu" else "load_seconds"

    def figure(self, peer: str) -> Figure | None:
        """Returns the value of a library's bar, in the unit of the panel."""
        seconds = self._run.figure(self._cell(peer), self._key)
        return seconds and self._scaled(seconds)

    def _cell(self, peer: str) -> Cell:
        return Cell(self._panel.workload, self._panel.action, self._panel.state, peer)

    def draw(self, axis: Axes, peers: list[str]) -> None:
        for row, peer in enumerate(peers):
            figure = self.figure(peer)
            if figure is None:
                reason = shorten(self._run.reason(self._cell(peer)), REASON_LENGTH, placeholder=" ...")
                axis.text(0, row, f"  {reason}", va="center", fontsize=7.5, style="italic", color=SPREAD)
                continue
            spread = [[figure.median - figure.low], [figure.high - figure.median]]
            color = OWN if PEERS[peer].release is None else OTHER
            axis.barh(row, figure.median, color=color, height=0.72, xerr=spread, ecolor=SPREAD, capsize=2)
            axis.annotate(number(figure.median), (figure.high, row), **LABEL)
        axis.set_yticks(range(len(peers)), [PEERS[peer].title for peer in peers], fontsize=8)
        axis.set_ylim(len(peers) - 0.4, -0.6)
        limit = self._mark_limit(axis, list(filter(None, map(self.figure, peers))))
        axis.margins(x=0.16)
        axis.set_xlim(left=0)
        facts = {"size": self._facts["bytes"] / 1e6, "tensors": self._facts["tensors"]}
        axis.set_title(self._panel.title.format(**facts), fontsize=9.5, loc="left")
        axis.set_xlabel(f"{self._unit()}{limit}", fontsize=8.5)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)

    @abstractmethod
    def _unit(self) -> str:
        """Returns the label of the axis."""

    @abstractmethod
    def _scaled(self, seconds: Figure) -> Figure:
        """Converts a time to the unit of the bars."""

    def _mark_limit(self, axis: Axes, figures: list[Figure]) -> str:
        """Marks the ceiling of the hardware, if it is a single figure, and returns its name for the label."""
        return ""


class _Rates(_Bars):
    title = "Rate to {done}, {device}: more is better"

    def _unit(self) -> str:
        return "GB/s"

    def _scaled(self, seconds: Figure) -> Figure:
        gigabytes = self._facts["bytes"] / 1e9
        return seconds.map(lambda value: gigabytes / value)

    def _mark_limit(self, axis: Axes, figures: list[Figure]) -> str:
        limit, name = self._limit()
        largest = max((figure.median for figure in figures), default=0.0)
        # The rate of a disk changes from minute to minute. A rate that a load has exceeded is no ceiling.
        if limit < largest or not limit:
            return ""
        if limit > SCALE_MAX * largest:
            return f"; {name}: {number(limit)}, beyond this scale"
        axis.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=1.5)
        return f"; dashed: {name}, {number(limit)}"

    def _limit(self) -> tuple[float, str]:
        """Returns the largest rate of the hardware in all rounds of the run, or 0, and its name."""
        rates = []
        if self._panel.state == "cold":
            ceiling, name = self._run.disk(), "reading the disk"
            rates = [self._run.largest(peer, RAW_RATE) or 0.0 for peer in self._run.peers()]
        elif self._run.device == "cpu":
            ceiling, name = "memory-read", "reading memory"
        else:
            ceiling, name = "pinned-to-device", "pinned copies"
        if figure := self._run.ceiling(ceiling):
            rates.append(figure.high)
        return max(rates, default=0.0) / 1e9, name


class _Times(_Bars):
    title = "Time to {done}, {device}: less is better"

    def _unit(self) -> str:
        return "ms"

    def _scaled(self, seconds: Figure) -> Figure:
        return seconds.map(lambda value: value * 1e3)
