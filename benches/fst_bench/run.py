"""Measures fst and its peers side by side, and writes JSON, tables and charts.

    fst-bench                                   # files: everything, at a size chosen for this machine
    fst-bench --gib 0.05 --rounds 1             # a few minutes, to see that it works
    fst-bench --workloads dense,moe --states tmpfs,warm --device cuda
    fst-bench ranks                             # several ranks on the CPU, about four minutes
    fst-bench remote                            # HTTP and S3 on this machine, about half an hour

`fst-bench ranks --help` and `fst-bench remote --help` list their options. In a checkout, `make bench`,
`make bench-ranks` and `make bench-remote` with BENCH_ARGS="..." do the same. Raw results are written after each
measurement, so an interrupted run loses nothing. `python -m fst_bench.report` writes tables and charts from them again.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from .bench import Bench, Choice, log
from .ceiling import CEILINGS
from .cell import ACTIONS, RANKED, STATES
from .checkpoint import make_checkpoint
from .command import command_line
from .directories import CHECKPOINTS, REPORT, RESULTS, TMPFS
from .files import TORCH_DEVICES, FilesBench
from .peer import PEERS_OF_FILES, PEERS_OF_RANKS, PEERS_OF_URLS, install_missing
from .ranks.bench import RanksBench
from .ranks.expected import with_groups
from .ranks.layout import GROUP_SIZES, LAYOUTS, dense
from .remote.bench import RemoteBench
from .remote.service import SERVICES
from .report import write_report
from .workload import WORKLOADS

GIB = 1 << 30
DEFAULT_MINUTES = {"cpu": 60.0, "cuda": 7.0}
DEFAULT_BYTES_MAX = 4 * GIB
DEFAULT_BYTES_MIN = GIB // 16
# Empty by default: each workload has its own.
OF_WORKLOAD = ("states", "actions")

Name = TypeVar("Name", bound=str | int)


class Kind(NamedTuple):
    """Kind of benchmark, the names from which its options select, and its defaults."""

    bench: type[Bench]
    names: Mapping[str, Sequence[str] | Sequence[int]]
    rounds: int = 7
    minutes: float | None = None
    gib: float | None = None


KINDS = {
    "files": Kind(
        FilesBench,
        {
            "workloads": list(WORKLOADS),
            "states": STATES,
            "actions": ACTIONS,
            "peers": PEERS_OF_FILES,
            "ceilings": list(CEILINGS),
        },
    ),
    "ranks": Kind(
        RanksBench,
        {"ranks": GROUP_SIZES, "layouts": list(LAYOUTS), "states": ("warm", "cold"), "peers": PEERS_OF_RANKS},
        rounds=3,
        minutes=8,
        gib=0.25,
    ),
    "remote": Kind(
        RemoteBench,
        {
            "services": list(SERVICES),
            "workloads": ("dense", "moe", "adapter"),
            "peers": PEERS_OF_URLS,
            "ranks": GROUP_SIZES,
            "layouts": ("replicated", "rows"),
        },
        minutes=45,
        gib=0.25,
    ),
}


def chosen(known: Sequence[Name], what: str) -> Callable[[str], list[Name]]:
    """Returns a parser for a comma-separated list of these names."""

    def parse(text: str) -> list[Name]:
        by_text = {str(name): name for name in known}
        names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
        unknown = [name for name in names if name not in by_text]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}, expected some of {', '.join(by_text)}")
        return [by_text[name] for name in names]

    return parse


def _arguments(name: str) -> argparse.Namespace:
    kind = KINDS[name]
    prog = f"fst-bench {name}" if name != "files" else "fst-bench"
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, names in kind.names.items():
        default, known = ([], "those of each workload") if option in OF_WORKLOAD else (names, "all")
        text = f"some of {','.join(map(str, names))}, or none; default: {known}"
        parser.add_argument(f"--{option}", type=chosen(names, option.removesuffix("s")), default=default, help=text)
    if name == "files":
        parser.add_argument("--device", choices=list(TORCH_DEVICES), help="default: both, if there is a GPU")
    text = f"size of each large workload; default: {kind.gib or 'what fits this machine'}"
    parser.add_argument("--gib", type=float, default=kind.gib, help=text)
    parser.add_argument("--rounds", type=int, default=kind.rounds, help="default: %(default)s")
    text = f"time limit for each device; default: {kind.minutes or '60, cuda 7'}"
    parser.add_argument("--minutes", type=float, default=kind.minutes, help=text)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md and the charts")
    parser.add_argument("--cache-dir", type=Path, default=CHECKPOINTS, help="directory of the checkpoints")
    parser.add_argument("--no-install", action="store_true", help="use installed peers only; no network")
    args = parser.parse_args()
    args.cache_dir = args.cache_dir.absolute()  # for servers, which have a working directory of their own
    return args


def default_bytes(directory: Path) -> int:
    """Returns the smallest of 1/32 of memory, 1/8 of tmpfs and 1/30 of the free disk, within bounds."""
    directory.mkdir(parents=True, exist_ok=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tmpfs = shutil.disk_usage(TMPFS).free if TMPFS.exists() else memory
    fitting = min(memory // 32, tmpfs // 8, shutil.disk_usage(directory).free // 30)
    return max(DEFAULT_BYTES_MIN, min(DEFAULT_BYTES_MAX, fitting))


def main() -> None:
    command = command_line("fst-bench")
    name = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in KINDS else "files"
    args, kind = _arguments(name), KINDS[name]
    selected = {option: getattr(args, option) for option in kind.names}
    workloads = [*selected.pop("workloads", []), *([RANKED] if selected.get("ranks") else [])]
    device = getattr(args, "device", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch finds no GPU here")
    if not args.peers or not workloads:
        sys.exit("nothing to measure: name at least one peer and one workload")
    if not args.no_install:
        install_missing(args.peers)
    size_bytes = int(args.gib * GIB) if args.gib else default_bytes(args.cache_dir)
    log(f"making checkpoints of {size_bytes / GIB:.2f} GiB in {args.cache_dir}")
    make = {**WORKLOADS, RANKED: dense}
    checkpoints = {name: make_checkpoint(make[name](size_bytes), args.cache_dir) for name in workloads}
    if RANKED in checkpoints:
        checkpoints[RANKED] = with_groups(checkpoints[RANKED], args.layouts, args.ranks)

    devices = [device] if device else list(TORCH_DEVICES)[: 1 + torch.cuda.is_available()]
    right = True
    for device in devices:
        choice = Choice(command, rounds=args.rounds, device=device, **selected)
        minutes = args.minutes or DEFAULT_MINUTES[device]
        right = kind.bench(choice, checkpoints, args.out, args.cache_dir).run(minutes * 60) and right
    write_report(args.out, args.report)
    if not right:
        sys.exit("wrong tensors, or a load by fst that failed: see the results")
