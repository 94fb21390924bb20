"""Measures fst and its peers side by side, and writes JSON, tables and charts.

    fst-bench                                   # files: everything, at a size chosen for this machine
    fst-bench --gib 0.05 --rounds 1             # a few minutes, to see that it works
    fst-bench --workloads dense,moe --states tmpfs,warm --device cuda
    fst-bench ranks                             # several ranks on the CPU, about four minutes
    fst-bench remote                            # HTTP and S3 on this machine, about half an hour

The other suites are small_calls, updates, saves, dcp and simulation. `fst-bench SUITE --help` lists their
options. In a checkout, `make bench`, `make bench-ranks` and so on with BENCH_ARGS="..." do the same. Raw results are
written after each measurement, so an interrupted run loses nothing. `python -m fst_bench.report` writes tables and
charts from them again.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from .directories import CHECKPOINTS, PACKAGE, REPORT, RESULTS, TMPFS
from .registry import SUITES
from .report import write_report
from .suite import Suite

GIB = 1 << 30
DEFAULT_BYTES_MAX = 4 * GIB
DEFAULT_BYTES_MIN = GIB // 16
# Options that name directories, which differ between machines and decide no figure.
DIRECTORIES = ("--out", "--report", "--cache-dir", "--directory")


def chosen(known: Sequence[Any], what: str) -> Callable[[str], list[Any]]:
    """Returns a parser for a comma-separated list of these names, or of any numbers if there are none."""

    def parse(text: str) -> list[Any]:
        by_text = {str(name): name for name in known}
        names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
        unknown = [name for name in names if name not in by_text]
        if known and unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}, expected some of {', '.join(by_text)}")
        return [by_text[name] if known else int(name) for name in names]

    return parse


def parser_of(suite: type[Suite], prog: str) -> argparse.ArgumentParser:
    """Returns the parser of the arguments of a suite."""
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, (default, known) in suite.options.items():
        default_text = "each workload's" if not default else "all" if list(default) == list(known) else default
        text = (
            f"some of {','.join(map(str, known))}, or none; default: {default_text}" if known else f"default: {default}"
        )
        what = option.removesuffix("s")
        parser.add_argument(f"--{option}", type=chosen(known, what), nargs="+", default=[default], help=text)
    for argument, options in suite.arguments.items():
        parser.add_argument(argument, **options)
    text = f"size of each large workload; default: {' '.join(map(str, suite.gib)) or 'what fits this machine'}"
    parser.add_argument("--gib", type=float, nargs="+", default=suite.gib, help=text)
    parser.add_argument("--rounds", type=int, default=suite.rounds, help="default: %(default)s")
    text = f"time limit for each device; default: {suite.minutes or 'set by the device, or none'}"
    parser.add_argument("--minutes", type=float, default=suite.minutes, help=text)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md and the charts")
    text = "directory of the files that are measured; default: %(default)s"
    parser.add_argument("--cache-dir", "--directory", type=Path, default=suite.directory or CHECKPOINTS, help=text)
    parser.add_argument("--no-install", action="store_true", help="use installed peers only; no network")
    return parser


def default_bytes(directory: Path) -> int:
    """Returns the smallest of 1/32 of memory, 1/8 of tmpfs and 1/30 of the free disk, within bounds."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tmpfs = shutil.disk_usage(TMPFS).free if TMPFS.exists() else memory
    fitting = min(memory // 32, tmpfs // 8, shutil.disk_usage(directory).free // 30)
    return max(DEFAULT_BYTES_MIN, min(DEFAULT_BYTES_MAX, fitting))


def command_line(*program: str) -> str:
    """Returns the command that runs `program` with the arguments of this process, without directories."""
    words, kept = iter(sys.argv[1:]), list(program)
    for word in words:
        option, has_value, _ = word.partition("=")
        if option not in DIRECTORIES:
            kept.append(word)
        elif not has_value:
            next(words, None)
    return shlex.join(kept)


def main(name: str = "") -> None:
    """Runs a suite, which the first argument names by default, with the arguments of this process."""
    program = ["python", "-m", f"{PACKAGE.name}.{name}"] if name else ["fst-bench"]
    command = command_line(*program)
    if not name:
        name = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in SUITES else "files"
    suite = SUITES[name]
    args = parser_of(suite, f"fst-bench {name}" if name != "files" else "fst-bench").parse_args()
    for name in (option.replace("-", "_") for option in suite.options):
        setattr(args, name, list(chain.from_iterable(getattr(args, name))))
    args.command = command
    args.cache_dir = args.cache_dir.absolute()  # for servers, which have a working directory of their own
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    args.size_bytes = int(args.gib[0] * GIB) if args.gib else default_bytes(args.cache_dir)
    right = [made.run() for made in suite.made(args)]
    if suite.has_page:
        write_report(args.out, args.report)
    if not all(right):
        sys.exit("wrong tensors, or a measurement of fst that failed: see the results")
