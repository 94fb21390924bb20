"""Measures saves of DTensors by several ranks, beside PyTorch's writers and saves by one rank.

    python -m fst_bench.saves
    python -m fst_bench.saves --gib 0.1 --rounds 1 --ranks 2 --layouts rows

Each round has new processes for each layout, and its own random order of methods. The result goes to
bench-results/saves.json and, with the other results, to BENCHMARKS.md.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..bench import log
from ..command import command_line
from ..directories import CHECKPOINTS, PACKAGE, REPORT, RESULTS
from ..machine import commit, load_average, machine_facts
from ..ranks.layout import dense
from ..report import write_report
from ..workload import Workload
from .methods import METHODS
from .rank import Task, run
from .section import SAVES
from .state import LAYOUTS, RANKS

ROUNDS = 7


def results(
    workload: Workload,
    layouts: Sequence[str],
    ranks: Sequence[int],
    methods: Sequence[str],
    rounds: int,
    folder: Path,
    command: str,
) -> Iterator[dict[str, Any]]:
    """Yields the raw result so far after each round."""
    result: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": 0,
        "machine": machine_facts(folder) | {"torch_threads": 1},
        "load_average_before": load_average(),
        "workload": {"title": workload.title, "bytes": workload.size_bytes, "tensors": len(workload.tensors)},
        "titles": {name: method.title for name, method in METHODS.items()},
        "measurements": [],
    }
    for number in range(rounds):
        for layout, count in product(layouts, ranks):
            order = random.Random(f"{number} {layout} {count}").sample(methods, len(methods))
            for method, figures in run(Task(workload, layout, count, order, folder)).items():
                log(f"round {number + 1}: {layout}, {count} ranks, {method}: {figures['durable_seconds']:.3f} s")
                cell = {"layout": layout, "ranks": count, "method": method}
                result["measurements"].append({**cell, **figures})
        result |= {"rounds": number + 1, "load_average_after": load_average()}
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the tensors; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md")
    parser.add_argument("--cache-dir", type=Path, default=CHECKPOINTS, help="directory on the disk to measure")
    args = parser.parse_args()
    command = command_line("python", "-m", f"{PACKAGE.name}.saves")
    # The processes are forked, and must not inherit the locks of threads.
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.cache_dir.absolute()) as folder:
        workload = dense(int(args.gib * (1 << 30)))
        for result in results(workload, args.layouts, args.ranks, args.methods, args.rounds, Path(folder), command):
            # An interrupted run loses one round.
            (args.out / SAVES).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)


if __name__ == "__main__":
    main()
