"""Runs the bench: every workload, state and peer, round by round, each in a process of its own.

    python benches/run.py                              # about half an hour
    python benches/run.py --scale 0.01 --rounds 1      # a few minutes, to see that it works
    python benches/run.py --device cuda --budget-seconds 480

Raw results are written to --out as JSON as they come; `python benches/report.py` makes the
tables and the chart from them. Peers that are not installed are left out with the reason:
`python benches/peer.py` installs them.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import TORCH_DEVICES, Bench, Deadline
from cell import STATES
from peer import PEERS, REPOSITORY
from workload import WORKLOADS


def _chosen(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}, expected some of {', '.join(known)}")
        return names

    return parse


def _arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fst-bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(TORCH_DEVICES))
    parser.add_argument("--workloads", type=_chosen(list(WORKLOADS), "workload"), default=list(WORKLOADS))
    parser.add_argument("--states", type=_chosen(STATES, "state"), default=["warm", "cold"])
    parser.add_argument("--peers", type=_chosen(list(PEERS), "peer"), default=list(PEERS))
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads; 1 is 4 GiB for dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="end the run after this time")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench-results", help="where the JSON goes")
    parser.add_argument("--cache-dir", type=Path, default=cache, help="where the checkpoints are kept")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda: PyTorch finds no GPU here")
    if not Bench(args, Deadline(args.budget_seconds)).run():
        sys.exit("wrong tensors, or a load by fst that failed: see the results")


if __name__ == "__main__":
    main()
