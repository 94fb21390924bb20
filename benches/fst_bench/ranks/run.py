"""Measures loads by several ranks on the CPU: fst, fastsafetensors, and safetensors with slices.

    python -m fst_bench.ranks                        # about four minutes
    python -m fst_bench.ranks --gib 0.03 --rounds 1  # less than a minute, to see that it works

Raw results go to bench-results/ranks.json as they come; tables and goals to BENCHMARKS.md.
"""

import argparse
import shlex
import sys

from ..bench import Deadline
from ..checkpoint import make_checkpoint
from ..directories import PACKAGE
from ..peer import PEERS, install_missing
from ..report import write_report
from ..run import GIB, add_place_arguments, chosen
from .bench import STATES, Choice, RanksBench
from .layout import LAYOUTS, dense

SIZES = ("2", "4")
PEERS_OF_RANKS = [name for name, peer in PEERS.items() if "sharded" in peer.actions]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=chosen(SIZES, "number of ranks"), default=SIZES)
    parser.add_argument("--layouts", type=chosen(list(LAYOUTS), "layout"), default=list(LAYOUTS))
    parser.add_argument("--states", type=chosen(STATES, "state"), default=STATES)
    parser.add_argument("--peers", type=chosen(PEERS_OF_RANKS, "peer"), default=PEERS_OF_RANKS)
    parser.add_argument("--gib", type=float, default=0.25, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit")
    add_place_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if not args.no_install:
        install_missing(args.peers)
    checkpoint = make_checkpoint(dense(int(args.gib * GIB)), args.cache_dir)
    sizes = [int(count) for count in args.ranks]
    command = shlex.join(["python", "-m", f"{PACKAGE.name}.ranks", *sys.argv[1:]])
    choice = Choice(sizes, args.layouts, args.states, args.peers, args.rounds, command)
    right = RanksBench(choice, checkpoint, args.out).run(Deadline(args.minutes * 60))
    write_report(args.out, args.report)
    if not right:
        sys.exit("wrong tensors, or a load by fst that failed: see the results")


if __name__ == "__main__":
    main()
