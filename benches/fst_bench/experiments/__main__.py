"""Runs one of two commands on a machine with a GPU, or one experiment.

    python -m fst_bench.experiments 1 OUT          # experiments, in at most 420 s
    python -m fst_bench.experiments 2 OUT          # tests, and figures beside other libraries, in at most 300 s
    python -m fst_bench.experiments NAME OUT       # one experiment

`--small` copies few bytes and loads to the CPU, which shows that everything works. `make gpu-lease-1` and
`make gpu-lease-2` run the commands.
"""

import argparse
import sys
from pathlib import Path

from .context import Context
from .driver import LIBRARY
from .lease import BUDGETS, EXPERIMENTS, run_experiment, run_steps, steps_of

AMOUNTS = {True: (4 << 20, 1, "cpu"), False: (2 << 30, 5, "cuda")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*BUDGETS, *EXPERIMENTS])
    parser.add_argument("out", type=Path, help="folder of all results, and of the files that are loaded")
    parser.add_argument("--driver", default=LIBRARY, help="library of the driver, default: %(default)s")
    parser.add_argument("--small", action="store_true", help="few bytes, and loads to the CPU")
    args = parser.parse_args()
    out = args.out.absolute()
    if args.what in EXPERIMENTS:
        limit = EXPERIMENTS[args.what][1]
        run_experiment(args.what, Context(args.driver, *AMOUNTS[args.small], out / "files", limit), out)
        return
    options = [f"--driver={args.driver}", *(["--small"] if args.small else [])]
    done = run_steps(args.what, steps_of(args.what, out, options), out)
    sys.exit(f"failed: {', '.join(failed)}" if (failed := [step for step, status in done.items() if status]) else 0)


if __name__ == "__main__":
    main()
