"""Measures loads of checkpoints by ranks through `torch.distributed.checkpoint`: fst beside PyTorch.

    python -m fst_bench.dcp
    python -m fst_bench.dcp --gib 0.234375 --layouts columns --ranks 4 --states warm

Each measurement runs in new processes, and each round has its own random order. The result goes to
bench-results/dcp.json and, with the other results, to BENCHMARKS.md.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

from ..bench import log, workload_facts
from ..checkpoint import Checkpoint, make_checkpoint
from ..command import command_line
from ..directories import CHECKPOINTS, PACKAGE, REPORT, RESULTS
from ..machine import commit, load_average, machine_facts
from ..ranks.layout import GROUP_SIZES, dense
from ..report import write_report
from .layouts import LAYOUTS
from .methods import METHODS
from .ranks import Job, measure
from .section import DCP, STATES

ROUNDS = 7


def results(
    checkpoints: Sequence[Checkpoint], jobs: Sequence[Job], rounds: int, command: str
) -> Iterator[dict[str, Any]]:
    """Yields the raw result so far after each round."""
    result: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": 0,
        "machine": machine_facts(checkpoints[0].paths[0].parent),
        "load_average_before": load_average(),
        "workloads": [workload_facts(checkpoint) for checkpoint in checkpoints],
        "measurements": [],
    }
    for number in range(rounds):
        for checkpoint in checkpoints:
            for job in random.Random(number).sample(jobs, len(jobs)):
                # A comparison takes longer than the measurement.
                figures = measure(job, checkpoint, is_checked=number == 0)
                if not figures.pop("is_right"):
                    sys.exit(f"{job}: the ranks have wrong tensors")
                facts = asdict(job) | {"bytes": checkpoint.workload.size_bytes}
                log(f"round {number + 1}: {' '.join(map(str, facts.values()))}: {figures['seconds']:.3f} s")
                result["measurements"].append(facts | figures)
        result |= {"rounds": number + 1, "load_average_after": load_average()}
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.234375, 1.0], help="sizes; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--actions", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=GROUP_SIZES, help="default: %(default)s")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES), help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md")
    parser.add_argument("--cache-dir", type=Path, default=CHECKPOINTS, help="directory of the checkpoints")
    args = parser.parse_args()
    command = command_line("python", "-m", f"{PACKAGE.name}.dcp")
    folder = args.cache_dir.absolute()
    checkpoints = [make_checkpoint(dense(int(gib * (1 << 30))), folder) for gib in args.gib]
    jobs = [
        Job(action, method, layout, ranks, state)
        for action in args.actions
        for layout, ranks, state in product(args.layouts, args.ranks, args.states)
        for method in METHODS[action]
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    for result in results(checkpoints, jobs, args.rounds, command):
        # An interrupted run loses one round.
        (args.out / DCP).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)
