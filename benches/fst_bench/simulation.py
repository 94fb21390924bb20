"""Suite of plans of loads and saves of large models by up to 4,096 ranks, with fst's own planner and real shapes."""

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import text
from .large_models import LAYOUTS, MODELS, NODE_RANKS, Layout, positions, write_sparse
from .page import Part
from .planner import LoadPlan, Planner
from .planning_cost import PLANNED, PlannedLayout, load_cost, save_cost
from .result import Run
from .suite import Case, Figures, Option, Suite
from .table import Column, comparison, of_median, seconds, size

PLANNED_MODEL = "qwen-30b"
WINDOW_BYTES = 512 << 20


class Window(NamedTuple):
    """One window of a plan.

    Attributes:
        collective: Collective of the window: "none", "gather" or "exchange".
        read_bytes: Bytes that each rank reads.
        sent_bytes: Bytes that each rank sends to others.
        send_bytes: Size of each rank's send buffer.
        received_bytes: Size of each rank's receive buffer.
    """

    collective: str
    read_bytes: list[int]
    sent_bytes: Tensor
    send_bytes: Tensor
    received_bytes: Tensor


def windows(plan: LoadPlan, ranks: int) -> Iterator[Window]:
    """Yields all windows of a plan for this number of ranks, in order."""
    for number in range(plan.call("windows")):
        collective, segments, _ = plan.call("traffic", 0, number)
        sent, received = map(torch.tensor, plan.call("sent_bytes", number))
        reads = [plan.call("reads", rank, number) for rank in range(ranks)]
        read_bytes = [sum(end - begin for _, begin, end in of_rank) for of_rank in reads]
        send = sent
        if collective == "gather":
            # Every rank sends as many bytes as the rank with the most, and receives the bytes of all ranks.
            [segment_bytes] = segments
            send, received = torch.full((ranks,), segment_bytes), torch.full((ranks,), ranks * segment_bytes)
        yield Window(collective, read_bytes, sent, send, received)


def totals(planned: Iterable[Window], kept_bytes: Sequence[int]) -> dict[str, int]:
    """Returns the totals of the windows of a load, after which each rank keeps this many bytes.

    They are the number of windows, the bytes that all ranks read and send, and the largest memory of any rank: its
    tensors and buffers.
    """
    count = read_bytes = sent_bytes = 0
    # Sized for the largest window that uses them: one pair of buffers for even windows, one for odd windows.
    buffers = torch.zeros(2, 2, len(kept_bytes), dtype=torch.int64)
    for window in planned:
        pair = buffers[count % 2]
        torch.maximum(pair, torch.stack([window.send_bytes, window.received_bytes]), out=pair)
        count += 1
        read_bytes += sum(window.read_bytes)
        sent_bytes += int(window.sent_bytes.sum())
    device_bytes = int((buffers.sum((0, 1)) + torch.tensor(kept_bytes)).max())
    return {"windows": count, "read_bytes": read_bytes, "sent_bytes": sent_bytes, "device_bytes": device_bytes}


class Simulation(Suite):
    """Costs of planning for one rank, and totals of the plans of all ranks."""

    name = "simulation"
    options: ClassVar = {
        "layouts": Option([layout.name for layout in LAYOUTS], [layout.name for layout in LAYOUTS]),
        "ranks": Option((8, 64, 512)),
        "planned-ranks": Option((64, 1024, 4096)),
    }
    arguments: ClassVar = {
        "--window-bytes": {
            "type": int,
            "default": WINDOW_BYTES,
            "help": "device memory of a rank for buffers, in bytes",
        }
    }
    rounds = 1

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._models = {name: make() for name, make in MODELS.items()}
        self.results["window_bytes"] = args.window_bytes
        self.results["workloads"] = {
            name: {
                "title": model.title,
                "bytes": model.size_bytes,
                "tensors": len(list(model.tensors)),
                "files": len(model.files),
            }
            for name, model in self._models.items()
        }

    def start(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._paths = {}
        for name, model in self._models.items():
            (folder / name).mkdir()
            self._paths[name] = write_sparse(model, folder / name)

    def tables(self) -> Iterator[Sequence[Case]]:
        for what, layout, ranks in product(("loads", "saves"), PLANNED, self.args.planned_ranks):
            name = {"name": what, "layout": layout.title, "ranks": ranks}
            yield [Case(name, partial(self._cost, what, layout, ranks))]
        for layout, ranks in product(LAYOUTS, self.args.ranks):
            if layout.name in self.args.layouts:
                name = {"name": "data", "workload": layout.model, "layout": layout.title, "ranks": ranks}
                yield [Case(name, partial(self._totals, layout, ranks))]

    def _cost(self, what: str, layout: PlannedLayout, ranks: int, number: int) -> Figures:
        if what == "loads":
            return load_cost(self._paths[PLANNED_MODEL], layout, ranks)
        return save_cost(list(self._models[PLANNED_MODEL].tensors), layout, ranks)

    def _totals(self, layout: Layout, ranks: int, number: int) -> Figures:
        model = self._models[layout.model]
        requests = layout.requests(model, positions(ranks, NODE_RANKS))
        plan = Planner(self._paths[layout.model]).plan(requests, "auto", self.args.window_bytes)
        kept = [model.kept_bytes(own, rank, ranks) for rank, own in enumerate(requests)]
        return totals(windows(plan, ranks), kept)


def introduction(run: Run) -> Iterator[str]:
    yield f"""\
fst's own code runs on the headers of models larger than this machine, on files without data. `docs/ranks.md`
describes the method. Buffers of a rank have at most {text.size(run.facts["window_bytes"])}.

- *CPU*, *sent* and *received* count one rank from the call of `fst.load_distributed` until all ranks have
  agreed on the plan: opening, headers, agreement and planning. *Memory* is the growth of its peak. Each is the larger
  figure of rank 0, which reads the headers, and of the last rank. `fst.save_distributed` is counted on
  the last rank, for describing and checking the tensors, agreement and planning.
- *Read of it* and *sent of it* are the bytes that all ranks read and send over the bytes of the checkpoint. *GPU
  memory* is the largest of any rank: its tensors and buffers.
"""


def tables(run: Run) -> Iterator[str]:
    planning = [
        Column("CPU", "cpu_seconds", seconds),
        Column("sent", "sent_bytes", size),
        Column("received", "received_bytes", size),
        Column("memory", "memory_bytes", size),
    ]
    for what in ("loads", "saves"):
        yield from _table(run, f"Planning of {what}", PLANNED_MODEL, {"name": what}, planning)
    for model, facts in run.workloads.items():
        of_model = of_median(lambda value, size_bytes=facts["bytes"]: text.quotient(value / size_bytes))
        data = [
            Column("read of it", "read_bytes", of_model),
            Column("sent of it", "sent_bytes", of_model),
            Column("GPU memory", "device_bytes", size),
            Column("windows", "windows", of_median(lambda value: f"{value:.0f}")),
        ]
        yield from _table(run, "Data of loads", model, {"name": "data", "workload": model}, data)


def _table(run: Run, title: str, model: str, where: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[str]:
    if names := run.names("layout", "ranks", **where):
        facts = run.workloads[model]
        yield f"## {title}: {facts['title']}\n"
        yield f"{facts['bytes'] / 1e9:.1f} GB in {facts['tensors']:,} tensors in {facts['files']} files.\n"
        rows = (((name["layout"], str(name["ranks"])), {**where, **name}) for name in names)
        yield from comparison(run, ("layout", "ranks"), rows, columns)


PARTS = {"simulation": Part("Simulation", "simulation", tables, introduction=introduction)}

if __name__ == "__main__":
    from .run import main

    main("simulation")
