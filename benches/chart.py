"""The chart of the README: one panel for each thing that is loaded, one bar for each library."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cell import Cell
from peer import PEERS
from result import Run

OWN, OTHER, LIMIT = "#d9480f", "#adb5bd", "#1864ab"
PANELS = {
    ("dense", "load", "warm"): "{size:.1f} GiB to the {device}, warm page cache",
    ("dense", "load", "cold"): "{size:.1f} GiB to the {device}, cold page cache",
    ("dense", "load", "tmpfs"): "{size:.1f} GiB to the {device}, tmpfs",
    ("many", "select", "warm"): "10 of {tensors:,} tensors to the {device}",
}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes the chart of all runs, one row of panels each."""
    rows = [[table for table in run.tables() if table in PANELS] for run in runs]
    columns = max(len(row) for row in rows)
    peers = max(len(run.peers()) for run in runs)
    # A bare Figure needs no display.
    figure = Figure(figsize=(1.6 + 3.6 * columns, (1.2 + 0.3 * peers) * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), columns, squeeze=False, sharey="row")
    for run, row, places in zip(runs, rows, axes, strict=True):
        for axis, table in zip(places, row, strict=False):
            _panel(axis, run, table)
        for axis in places[len(row) :]:
            axis.axis("off")
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _panel(axis: Axes, run: Run, table: tuple[str, str, str]) -> None:
    peers = [peer for peer in run.peers() if _measured_anywhere(run, peer)]
    times = [run.figure(Cell(*table, peer), "load_and_read_seconds") for peer in peers]
    in_ms = max((time.median for time in times if time), default=0) < 1
    factor = 1e3 if in_ms else 1.0
    for place, (peer, time) in enumerate(zip(peers, times, strict=True)):
        if time is None:
            axis.text(0, place, "  -", va="center", fontsize=8)
            continue
        low, high = (time.median - time.low) * factor, (time.high - time.median) * factor
        color = OWN if PEERS[peer].release is None else OTHER
        axis.barh(place, time.median * factor, color=color, xerr=[[low], [high]], ecolor="#495057", capsize=2)
        axis.text(time.high * factor, place, f"  {time.median * factor:.3g}", va="center", fontsize=8)
    axis.set_yticks(range(len(peers)), [PEERS[peer].title for peer in peers], fontsize=8)
    axis.set_ylim(len(peers) - 0.4, -0.6)
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
    facts = run.workloads[table[0]]
    device = "CPU" if run.device == "cpu" else "GPU"
    title = PANELS[table].format(size=facts["bytes"] / (1 << 30), tensors=facts["tensors"], device=device)
    axis.set_title(title, fontsize=9, loc="left")
    limit = _mark_limit(axis, run, table, factor)
    axis.set_xlabel(f"{'ms' if in_ms else 's'} to load and read every byte{limit}", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _measured_anywhere(run: Run, peer: str) -> bool:
    return any(run.figure(Cell(*table, peer), "load_and_read_seconds") for table in run.tables())


def _mark_limit(axis: Axes, run: Run, table: tuple[str, str, str], factor: float) -> str:
    """Marks the least time that the slowest piece of hardware on the way allows; says which that is."""
    workload, action, state = table
    if action != "load":
        return ""
    if state == "cold":
        limit, name = run.disk_rate(), "direct reads of the disk"
    elif run.device == "cpu":
        limit, name = run.ceiling("memory, read"), "reading memory"
    else:
        limit, name = run.ceiling("pinned host to device"), "pinned copies"
    if limit is None:
        return ""
    time = run.workloads[workload]["bytes"] / limit.median * factor
    axis.axvline(time, color=LIMIT, linestyle="--", linewidth=1)
    return f" (dashed: {name})"
