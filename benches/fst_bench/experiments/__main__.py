"""Runs experiments that decide how loads to a GPU copy, pin, allocate and wait, in less than eight minutes.

`python -m fst_bench.experiments`, or `make gpu-experiments`, needs the CUDA driver, PyTorch and a build of fst, and no
compiler. It prints a table after each experiment, with the decision that it drives, and writes the figures to a file of
parameters for the timed driver, with the names of benches/h100.toml. The first experiments matter most, because a
machine may be lost at any time.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ..directories import RESULTS
from .copies import copies
from .driver import LIBRARY, Driver, DriverError
from .events import waits
from .experiment import Experiment, Row, Settings
from .loads import cold, loads, options, sizes, tmpfs
from .memory import allocation, objects, registration
from .probe import probe

EXPERIMENTS = (
    Experiment("probe", "whether slots get huge pages, and how many threads feed a GPU", probe),
    Experiment("loads", "what all others are compared with", loads),
    Experiment("copies", "one stream or two, an event after each copy, and the size of chunks", copies),
    Experiment("registration", "huge pages for slots, one registration at a time, fst.prepare", registration),
    Experiment("options", "slots of a first load, and threads", options),
    Experiment("waits", "how workers wait for a slot", waits),
    Experiment("allocation", "allocation in windows while the transfer runs", allocation),
    Experiment("objects", "the module only for loads with kernels, and streams that are kept", objects),
    Experiment("sizes", "what to do about the fixed cost of a load, and about its rate", sizes),
    Experiment("tmpfs", "huge pages of files in tmpfs", tmpfs),
    Experiment("cold", "the depth of the queue of direct reads", cold),
)
FULL = Settings(total_bytes=2 << 30, repeats=5, device="cuda")
SMALL = Settings(total_bytes=4 << 20, repeats=1, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--driver", default=LIBRARY, help="library of the driver, default: %(default)s")
    parser.add_argument("--small", action="store_true", help="few bytes, and loads to the CPU: shows that it works")
    parser.add_argument("--minutes", type=float, default=8, help="starts no experiment later; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    args = parser.parse_args()
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in args.only]
    results = run(chosen, args.driver, SMALL if args.small else FULL, time.monotonic() + args.minutes * 60)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = {name: [asdict(row) for row in rows] for name, rows in results.items()}
    (args.out / "gpu-experiments.json").write_text(json.dumps(rows, indent=1))
    parameters = args.out / "gpu-experiments.toml"
    measured = (row for rows in results.values() for row in rows if row.parameter)
    parameters.write_text("".join(f"{row.parameter} = {row.median:.4g}\n" for row in measured))
    print(f"wrote {parameters}", file=sys.stderr)


def run(experiments: Iterable[Experiment], library: str, settings: Settings, end: float) -> dict[str, list[Row]]:
    """Runs the experiments, prints their tables, and returns their rows. Starts none after the time `end`."""
    try:
        driver = Driver(library)
    except DriverError as error:
        driver = None
        print(f"without a driver: {error}")
    results: dict[str, list[Row]] = {}
    for experiment in experiments:
        start, rows = time.monotonic(), results.setdefault(experiment.name, [])
        print(f"\n## {experiment.name}, which decides: {experiment.decides}", flush=True)
        if start > end:
            print("not run: the time is over")
            continue
        try:
            for row in experiment.run(driver, settings):
                print(_line(row), flush=True)
                rows.append(row)
        except (DriverError, OSError) as error:
            print(f"not available: {error}")
        print(f"({time.monotonic() - start:.0f} s)")
    return results


def _line(row: Row) -> str:
    if not row.values:
        return row.what
    return f"{row.median:10.2f} {row.unit:5} [{min(row.values):.2f} .. {max(row.values):.2f}]  {row.what}"


if __name__ == "__main__":
    main()
