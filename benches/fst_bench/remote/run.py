"""Measures loads of remote checkpoints to the CPU: fst and its peers, over HTTP, from S3, and from afar.

    python -m fst_bench.remote                                  # about half an hour
    python -m fst_bench.remote --gib 0.02 --rounds 1            # about two minutes, to see that it works

The servers run on this machine. Raw results go to bench-results/remote.json as they come; tables and goals to
BENCHMARKS.md.
"""

import argparse
import shlex
import sys
from pathlib import Path

from ..bench import Deadline
from ..checkpoint import make_checkpoint
from ..directories import PACKAGE
from ..peer import PEERS_OF_URLS, install_missing
from ..ranks import layout
from ..ranks.run import SIZES
from ..report import write_report
from ..run import GIB, add_place_arguments, chosen
from ..workload import WORKLOADS
from .bench import Choice, RemoteBench
from .service import TITLES

REMOTE_WORKLOADS = ("dense", "moe", "adapter")
REMOTE_LAYOUTS = ("replicated", "rows")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=chosen(list(TITLES), "service"), default=list(TITLES))
    parser.add_argument("--workloads", type=chosen(REMOTE_WORKLOADS, "workload"), default=REMOTE_WORKLOADS)
    parser.add_argument("--peers", type=chosen(PEERS_OF_URLS, "peer"), default=PEERS_OF_URLS)
    parser.add_argument("--ranks", type=chosen(SIZES, "number of ranks"), default=SIZES, help="or none")
    parser.add_argument("--layouts", type=chosen(REMOTE_LAYOUTS, "layout"), default=REMOTE_LAYOUTS, help="of ranks")
    parser.add_argument("--gib", type=float, default=0.25, help="size of each large checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=45.0, help="time limit")
    parser.add_argument("--before", type=Path, help="an earlier libfst_core.so, whose size is compared")
    add_place_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if not args.no_install:
        install_missing(args.peers)
    size_bytes = int(args.gib * GIB)
    checkpoints = {name: make_checkpoint(WORKLOADS[name](size_bytes), args.cache_dir) for name in args.workloads}
    ranked = make_checkpoint(layout.dense(size_bytes), args.cache_dir)
    command = shlex.join(["python", "-m", f"{PACKAGE.name}.remote", *sys.argv[1:]])
    sizes = [int(count) for count in args.ranks]
    choice = Choice(args.services, args.peers, sizes, args.layouts, args.rounds, command, args.before)
    right = RemoteBench(choice, checkpoints, ranked, args.out, args.cache_dir).run(Deadline(args.minutes * 60))
    write_report(args.out, args.report)
    if not right:
        sys.exit("wrong tensors, or a load by fst that failed: see the results")


if __name__ == "__main__":
    main()
