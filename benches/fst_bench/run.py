"""Measures fst and its peers side by side, and writes JSON, tables and charts.

    fst-bench                                   # everything, at a size chosen for this machine
    fst-bench --gib 0.05 --rounds 1             # a few minutes, to see that it works
    fst-bench --workloads dense,moe --states tmpfs,warm --device cuda

In a checkout, `make bench BENCH_ARGS="..."` does the same. Raw results are written after each measurement, so an
interrupted run loses nothing. `python -m fst_bench.report` writes tables and charts from them again.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .bench import TORCH_DEVICES, Bench, Choice, Deadline
from .ceiling import CEILINGS
from .cell import ACTIONS, STATES
from .checkpoint import make_checkpoint
from .directories import CHECKPOINTS, REPORT, RESULTS, TMPFS
from .peer import PEERS_OF_FILES, install_missing
from .report import write_report
from .workload import WORKLOADS

GIB = 1 << 30
DEFAULT_MINUTES = {"cpu": 60.0, "cuda": 7.0}
DEFAULT_BYTES_MAX = 4 * GIB
DEFAULT_BYTES_MIN = GIB // 16


def chosen(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """Returns a parser for a comma-separated list of these names."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}, expected some of {', '.join(known)}")
        return names

    return parse


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the directories of results and checkpoints, and whether peers are installed."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md and the charts")
    parser.add_argument("--cache-dir", type=Path, default=CHECKPOINTS, help="directory of the checkpoints")
    parser.add_argument("--no-install", action="store_true", help="use installed peers only; no network")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(TORCH_DEVICES), help="cpu or cuda; default: both, if there is a GPU")
    parser.add_argument("--workloads", type=chosen(list(WORKLOADS), "workload"), default=list(WORKLOADS))
    parser.add_argument("--states", type=chosen(STATES, "state"), default=[], help="default: those of each workload")
    parser.add_argument("--actions", type=chosen(ACTIONS, "action"), default=[], help="default: those of each workload")
    parser.add_argument("--peers", type=chosen(PEERS_OF_FILES, "peer"), default=PEERS_OF_FILES)
    parser.add_argument("--ceilings", type=chosen(list(CEILINGS), "ceiling"), default=list(CEILINGS), help="or none")
    parser.add_argument("--gib", type=float, help="size of each large workload; default: what fits this machine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, help="time limit for each device; default: 60, cuda 7")
    add_place_arguments(parser)
    return parser.parse_args()


def default_bytes(directory: Path) -> int:
    """Returns the smallest of 1/32 of memory, 1/8 of tmpfs and 1/30 of the free disk, within bounds."""
    directory.mkdir(parents=True, exist_ok=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tmpfs = shutil.disk_usage(TMPFS).free if TMPFS.exists() else memory
    fitting = min(memory // 32, tmpfs // 8, shutil.disk_usage(directory).free // 30)
    return max(DEFAULT_BYTES_MIN, min(DEFAULT_BYTES_MAX, fitting))


def main() -> None:
    args = _arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch finds no GPU here")
    if not args.peers or not args.workloads:
        sys.exit("nothing to measure: name at least one peer and one workload")
    if not args.no_install:
        install_missing(args.peers)
    size_bytes = int(args.gib * GIB) if args.gib else default_bytes(args.cache_dir)
    print(f"making checkpoints of {size_bytes / GIB:.2f} GiB in {args.cache_dir}", file=sys.stderr, flush=True)
    checkpoints = {name: make_checkpoint(WORKLOADS[name](size_bytes), args.cache_dir) for name in args.workloads}

    devices = [args.device] if args.device else list(TORCH_DEVICES)[: 1 + torch.cuda.is_available()]
    right = True
    for device in devices:
        minutes = args.minutes or DEFAULT_MINUTES[device]
        command = shlex.join(["fst-bench", *sys.argv[1:]])
        choice = Choice(device, args.peers, args.states, args.ceilings, args.actions, args.rounds, command)
        bench = Bench(choice, checkpoints, args.out, args.cache_dir)
        bench.convert()
        estimate = bench.estimate_seconds() * args.rounds / 60
        print(
            f"{device}: {args.rounds} rounds may take {estimate:.0f} minutes; the run ends after {minutes:.0f}",
            file=sys.stderr,
            flush=True,
        )
        right = bench.run(Deadline(minutes * 60)) and right
    write_report(args.out, args.report)
    if not right:
        sys.exit("wrong tensors, or a load by fst that failed: see the results")
