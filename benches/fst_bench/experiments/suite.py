"""Suite of experiments that decide how loads to a GPU copy, pin, allocate and wait, in less than eight minutes.

They need the CUDA driver, PyTorch and a build of fst, and no compiler. The figures go to a file of parameters for the
timed driver, with the names of benches/h100.toml. The first experiments matter most, because a machine may be lost at
any time.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, ClassVar

from ..suite import Case, Figures, Option, Suite, log
from .context import Context
from .copies import copies
from .driver import LIBRARY, DriverError
from .events import waits
from .loads import cold, loads, options, sizes, tmpfs
from .memory import allocation, objects, registration
from .probe import probe

# Each experiment with the decision that its rows drive.
EXPERIMENTS = {
    "probe": (probe, "whether slots get huge pages, and how many threads feed a GPU"),
    "loads": (loads, "what all others are compared with"),
    "copies": (copies, "one stream or two, an event after each copy, and the size of chunks"),
    "registration": (registration, "huge pages for slots, one registration at a time, fst.warm_up"),
    "options": (options, "slots of a first load, and threads"),
    "waits": (waits, "how workers wait for a slot"),
    "allocation": (allocation, "allocation in windows while the transfer runs"),
    "objects": (objects, "the module only for loads with kernels, and streams that are kept"),
    "sizes": (sizes, "what to do about the fixed cost of a load, and about its rate"),
    "tmpfs": (tmpfs, "huge pages of files in tmpfs"),
    "cold": (cold, "the depth of the queue of direct reads"),
}


class Experiments(Suite):
    """All experiments, in the order in which they matter."""

    name = "experiments"
    options: ClassVar = {"only": Option(list(EXPERIMENTS), list(EXPERIMENTS))}
    arguments: ClassVar = {
        "--driver": {"default": LIBRARY, "help": "library of the driver, default: %(default)s"},
        "--small": {"action": "store_true", "help": "few bytes, and loads to the CPU: shows that it works"},
    }
    rounds, minutes = 1, 8
    has_page = False

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.file = "gpu-experiments"
        amount = (4 << 20, 1, "cpu") if args.small else (2 << 30, 5, "cuda")
        self._context = Context(args.driver, *amount)

    def start(self, stack: ExitStack) -> None:
        pass

    def tables(self) -> Iterator[Sequence[Case]]:
        for name in self.args.only:
            yield [Case({"name": name}, partial(self._rows, name), may_fail=True)]

    def _rows(self, name: str, number: int) -> list[Figures]:
        experiment, decides = EXPERIMENTS[name]
        log(f"\n## {name}, which decides: {decides}")
        rows: list[Figures] = []
        try:
            rows.extend(map(dict, experiment(self._context)))
        except (DriverError, OSError) as error:
            rows.append({"unavailable": str(error)})
        return rows

    def summary(self, row: Mapping[str, Any]) -> str:
        if not row.get("values"):
            return str(row["what"]) if "what" in row else super().summary(row)
        values = row["values"]
        return f"{median(values):10.2f} {row['unit']:5} [{min(values):.2f} .. {max(values):.2f}]  {row['what']}"

    def run(self) -> bool:
        """Runs the experiments, and writes their parameters."""
        is_right = super().run()
        parameters = self.args.out / f"{self.file}.toml"
        measured = (row for row in self.results["measurements"] if row.get("parameter"))
        parameters.write_text("".join(f"{row['parameter']} = {median(row['values']):.4g}\n" for row in measured))
        log(f"wrote {parameters}")
        return is_right
