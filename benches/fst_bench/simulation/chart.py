"""Chart of the simulation: seconds of a load over the number of ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..chart import LIMIT, OTHER, OWN

LINES = {
    "seconds": ("fst", OWN, "o", "-"),
    "sent_to_all": ("read once, sent to all", LIMIT, "s", "--"),
    "everyone_reads_all": ("everyone reads all", OTHER, "^", "-"),
}


def draw_simulation(result: Mapping[str, Any], folder: Path) -> None:
    """Writes simulation.png."""
    layouts = result["layouts"]
    columns = min(3, len(layouts))
    rows = -(-(len(layouts) + 1) // columns)
    picture = Figure(figsize=(9.6, 0.6 + 2.7 * rows), layout="constrained")
    picture.suptitle("Simulated time to load a model: less is better", fontsize=11, fontweight="bold")
    axes = list(picture.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, layout) in zip(axes, layouts.items(), strict=False):
        _panel(axis, [load for load in result["loads"] if load["layout"] == name])
        axis.set_xlabel(f"ranks, {result['cluster']['node_ranks']} to a node", fontsize=8)
        title = [result["models"][layout["model"]]["title"], *layout["title"].split(", ")]
        axis.set_title("\n".join(title), fontsize=8.5, loc="left")
    for axis in axes[len(layouts) :]:
        axis.axis("off")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[len(layouts)].legend(handles, labels, loc="center", fontsize=9, frameon=False)
    picture.savefig(folder / "simulation.png", dpi=130, metadata={"Software": None})


def _panel(axis: Axes, loads: list[Mapping[str, Any]]) -> None:
    ranks = [load["ranks"] for load in loads]
    for key, (label, color, marker, style) in reversed(LINES.items()):
        seconds = [load[key]["total"] for load in loads]
        axis.plot(ranks, seconds, style, color=color, marker=marker, markersize=4, linewidth=1.6, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ranks, [str(count) for count in ranks], fontsize=7.5)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="y", labelsize=7.5)
    axis.grid(True, which="major", color="#e5e5e5", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
