"""Measures updates of a live model from checkpoints and deltas, beside loads, and how deltas are made.

    python -m fst_bench.updates
    python -m fst_bench.updates --gib 0.1 --rounds 1

Each measurement runs in a separate process, and each round has its own random order. The result goes to
bench-results/updates.json and, with the other results, to BENCHMARKS.md.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..bench import log, plain_environment, workload_facts
from ..checkpoint import Checkpoint, make_checkpoint
from ..command import command_line
from ..directories import CHECKPOINTS, PACKAGE, REPORT, RESULTS
from ..machine import commit, load_average, machine_facts
from ..report import write_report
from ..workload import dense
from .measure import METHODS, Job
from .section import STATES, UPDATES
from .versions import ENCODINGS, make_versions

ROUNDS = 7


def child(job: Job) -> dict[str, Any]:
    """Measures in a separate process."""
    command = [sys.executable, "-m", f"{PACKAGE.name}.updates.measure", json.dumps(asdict(job))]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{job.method} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(job: Job) -> dict[str, Any]:
    """Returns the figures of a measurement, which must lead to the right tensors."""
    figures = child(job)
    if not figures.pop("is_right"):
        sys.exit(f"{job.method}: the module has wrong tensors")
    return figures


def results(checkpoint: Checkpoint, states: Sequence[str], rounds: int, command: str) -> Iterator[dict[str, Any]]:
    """Yields the raw result so far after each round."""
    [path] = checkpoint.paths
    versions = make_versions(path)
    sizes = {
        encoding: sum(file.stat().st_size for file in versions.delta(encoding).iterdir()) for encoding in ENCODINGS
    }
    result: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": 0,
        "machine": machine_facts(versions.folder),
        "load_average_before": load_average(),
        "workload": workload_facts(checkpoint),
        "delta_bytes": sizes,
        "measurements": [],
    }
    for number in range(rounds):
        due = [Job(method, state, str(versions.folder)) for state in states for method in METHODS]
        for job in random.Random(number).sample(due, len(due)):
            figures = measured(job)
            log(f"round {number + 1}: {job.method}, {job.state}: {figures['seconds']:.3f} s")
            result["measurements"].append({"method": job.method, "state": job.state, **figures})
        result |= {"rounds": number + 1, "load_average_after": load_average()}
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES), help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md")
    parser.add_argument("--cache-dir", type=Path, default=CHECKPOINTS, help="directory of the checkpoints")
    args = parser.parse_args()
    command = command_line("python", "-m", f"{PACKAGE.name}.updates")
    checkpoint = make_checkpoint(dense(int(args.gib * (1 << 30))), args.cache_dir.absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    for result in results(checkpoint, args.states, args.rounds, command):
        # An interrupted run loses one round.
        (args.out / UPDATES).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)
