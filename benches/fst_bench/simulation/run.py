"""Simulates loads of large models by 1 to 512 ranks, with fst's own planner on headers of the real shapes.

    python -m fst_bench.simulation
    python -m fst_bench.simulation --ranks 8,64 --layouts dense-replicated --storage-bytes-per-second 1e12

The result goes to bench-results/simulation.json and, with the other results, to BENCHMARKS.md and docs/images/.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..directories import PACKAGE, REPORT, RESULTS
from ..machine import commit
from ..report import write_report
from ..run import chosen
from .clock import Clock
from .cluster import Cluster
from .layout import LAYOUTS, Layout
from .load import Files
from .model import MODELS, Model
from .section import SIMULATION

RANKS = tuple(2**power for power in range(10))
WINDOW_BYTES = 512 << 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--layouts", type=chosen(names, "layout"), default=names)
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="sizes of the group, such as 1,8,64")
    parser.add_argument(
        "--window-bytes", type=int, default=WINDOW_BYTES, help="device memory of a rank for buffers, in bytes"
    )
    for field in fields(Cluster):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help="default: %(default)g")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md and the charts")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def simulated(
    layouts: Sequence[Layout], sizes: Sequence[int], cluster: Cluster, window_bytes: int, command: str
) -> dict[str, Any]:
    """Returns the raw result of a simulation."""
    models = [make() for make in MODELS.values()]
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cluster": asdict(cluster),
        "window_bytes": window_bytes,
        "models": {
            model.name: {
                "title": model.title,
                "bytes": model.size_bytes,
                "tensors": len(list(model.tensors)),
                "files": len(model.files),
            }
            for model in models
        },
        "layouts": {layout.name: {"title": layout.title, "model": layout.model} for layout in layouts},
        "loads": [load for model in models for load in _loads(model, layouts, sizes, cluster, window_bytes)],
    }


def _loads(
    model: Model, layouts: Sequence[Layout], sizes: Sequence[int], cluster: Cluster, window_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yields a row of the tables for each layout of a model and each number of ranks."""
    of_model = [layout for layout in layouts if layout.model == model.name]
    if not of_model:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = Files(model, Path(folder))
        for ranks in sizes:
            others = {
                "everyone_reads_all": asdict(Clock(cluster, ranks).everyone_reads_all(model.size_bytes)),
                "sent_to_all": asdict(files.sent_to_all(ranks, cluster, window_bytes)),
            }
            for layout in of_model:
                begin = time.perf_counter()
                load = files.load(layout, ranks, cluster, window_bytes)
                took = time.perf_counter() - begin
                print(f"{layout.name}, {ranks} ranks: simulated in {took:.1f} s", file=sys.stderr, flush=True)
                yield {"layout": layout.name, "ranks": ranks, **asdict(load), **others}


def main() -> None:
    args = _arguments()
    cluster = Cluster(**{field.name: getattr(args, field.name) for field in fields(Cluster)})
    layouts = [layout for layout in LAYOUTS if layout.name in args.layouts]
    command = shlex.join(["python", "-m", f"{PACKAGE.name}.simulation", *sys.argv[1:]])
    result = simulated(layouts, args.ranks, cluster, args.window_bytes, command)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / SIMULATION).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)


if __name__ == "__main__":
    main()
