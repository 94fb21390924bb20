"""Plans loads and saves of large models by up to 4,096 ranks, with fst's own planner and the real shapes.

    python -m fst_bench.simulation
    python -m fst_bench.simulation --ranks 8,64 --layouts dense-replicated

The result goes to bench-results/simulation.json and, with the other results, to BENCHMARKS.md.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from ..command import command_line
from ..directories import PACKAGE, REPORT, RESULTS
from ..machine import commit
from ..planner import Planner
from ..report import write_report
from ..run import chosen
from .layout import LAYOUTS, NODE_RANKS, Layout, positions
from .model import MODELS, Model, write_sparse
from .planning import PLANNED, Cost, PlannedLayout, load_cost, save_cost
from .section import SIMULATION
from .window import total, windows

RANKS = (8, 64, 512)
PLANNED_RANKS = (64, 1024, 4096)
PLANNED_MODEL = "qwen-30b"
WINDOW_BYTES = 512 << 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--layouts", type=chosen(names, "layout"), default=names)
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="sizes of the group, such as 1,8,64")
    parser.add_argument(
        "--planned-ranks", type=_numbers, default=PLANNED_RANKS, help="sizes of the group whose planning is measured"
    )
    parser.add_argument(
        "--window-bytes", type=int, default=WINDOW_BYTES, help="device memory of a rank for buffers, in bytes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def simulated(
    layouts: Sequence[Layout], sizes: Sequence[int], planned_sizes: Sequence[int], window_bytes: int, command: str
) -> dict[str, Any]:
    """Returns the raw result of a simulation."""
    models = {name: make() for name, make in MODELS.items()}
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "window_bytes": window_bytes,
        "models": {
            name: {
                "title": model.title,
                "bytes": model.size_bytes,
                "tensors": len(list(model.tensors)),
                "files": len(model.files),
            }
            for name, model in models.items()
        },
        "planned_model": PLANNED_MODEL,
        "planned_loads": _planned_loads(models[PLANNED_MODEL], planned_sizes),
        "planned_saves": _costs("save", partial(save_cost, list(models[PLANNED_MODEL].tensors)), planned_sizes),
        "layouts": {layout.name: {"title": layout.title, "model": layout.model} for layout in layouts},
        "loads": [
            load
            for name, model in models.items()
            for load in _loads(model, [layout for layout in layouts if layout.model == name], sizes, window_bytes)
        ],
    }


def _planned_loads(model: Model, sizes: Sequence[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return _costs("load", partial(load_cost, write_sparse(model, Path(folder))), sizes)


def _costs(what: str, cost_of: Callable[[PlannedLayout, int], Cost], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row of the table for each layout and each number of ranks."""
    rows = []
    for layout, ranks in itertools.product(PLANNED, sizes):
        print(f"{layout.title}, {ranks} ranks: planning a {what}", file=sys.stderr, flush=True)
        rows.append({"layout": layout.title, "ranks": ranks, **cost_of(layout, ranks)._asdict()})
    return rows


def _loads(
    model: Model, layouts: Sequence[Layout], sizes: Sequence[int], window_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yields a row of the tables for each layout of a model and each number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(write_sparse(model, Path(folder)))
        for layout in layouts:
            for ranks in sizes:
                requests = layout.requests(model, positions(ranks, NODE_RANKS))
                plan = planner.plan(requests, "auto", window_bytes)
                kept = [model.kept_bytes(own, rank, ranks) for rank, own in enumerate(requests)]
                totals = total(windows(plan, ranks), kept)
                print(f"{layout.name}, {ranks} ranks: {totals.windows} windows", file=sys.stderr, flush=True)
                yield {"layout": layout.name, "ranks": ranks, **totals._asdict()}


def main() -> None:
    args = _arguments()
    layouts = [layout for layout in LAYOUTS if layout.name in args.layouts]
    command = command_line("python", "-m", f"{PACKAGE.name}.simulation")
    result = simulated(layouts, args.ranks, args.planned_ranks, args.window_bytes, command)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / SIMULATION).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)
