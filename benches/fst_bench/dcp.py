"""Suite of checkpoints that ranks load through `torch.distributed.checkpoint`: fst beside PyTorch."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

import fst.dcp

from . import memory, text
from .checkpoint import Checkpoint, make_checkpoint
from .goal import Goal, compared, quotient
from .group import Host, joined
from .layout import GROUP_SIZES, Layout, columns, dtensor, local_part, mixed, replicated, rows
from .measure import set_page_cache
from .meter import Meter
from .page import Part
from .result import Run
from .suite import Case, Figures, Option, Suite
from .table import Column, comparison, seconds, size
from .workload import RANKED, WORKLOADS, TensorSpec

LAYOUTS = {
    "replicated": Layout("every tensor on every rank", replicated),
    "rows": Layout("all tensors cut by rows, as by FSDP2", rows),
    "columns": Layout("matrices cut by columns", columns),
    "mixed": Layout("matrices cut by rows and columns, as by tensor parallelism", mixed),
}
STATES = {"warm": "warm page cache", "cold": "cold page cache"}


class Method(NamedTuple):
    title: str
    reader: Callable[[str], StorageReader]


# The goals compare the first with the others.
METHODS = {
    "fst": Method("`fst.dcp.StorageReader`", fst.dcp.StorageReader),
    "pytorch": Method("`HuggingFaceStorageReader`", HuggingFaceStorageReader),
}


class Dcp(Suite):
    """Loads of one checkpoint or more into DTensors by groups, with each reader."""

    name = "dcp"
    options: ClassVar = {
        "layouts": Option(list(LAYOUTS), list(LAYOUTS)),
        "ranks": Option(GROUP_SIZES),
        "states": Option(list(STATES), list(STATES)),
    }
    gib = (0.234375, 1.0)

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._checkpoints = {
            f"{gib:g}": make_checkpoint(WORKLOADS[RANKED](int(gib * (1 << 30))), args.cache_dir) for gib in args.gib
        }
        self.results["workloads"] = {name: made.workload.facts() for name, made in self._checkpoints.items()}

    def start(self, stack: ExitStack) -> None:
        self.results["machine"]["torch_threads"] = 1
        self._host = stack.enter_context(closing(Host("fst")))

    def tables(self) -> Iterator[Sequence[Case]]:
        args = self.args
        for name, checkpoint in self._checkpoints.items():
            groups = product(args.layouts, args.ranks, args.states, METHODS)
            yield [self._case(checkpoint, name, *group) for group in groups]

    def _case(self, checkpoint: Checkpoint, workload: str, layout: str, ranks: int, state: str, method: str) -> Case:
        name = {"workload": workload, "layout": layout, "ranks": ranks, "state": state, "method": method}
        paths, tensors = list(map(str, checkpoint.paths)), checkpoint.workload.tensors

        def measured(number: int) -> Figures:
            job: dict[str, Any] = {"paths": paths, "tensors": [list(vars(tensor).values()) for tensor in tensors]}
            # A comparison takes longer than the measurement.
            job |= {"layout": layout, "state": state, "method": method, "is_checked": number == 0}
            results = self._host.run("dcp:load_on_rank", ranks, **job)
            if "begin" not in results[0]:
                return results[0]
            return joined(results, {"seconds": "end"})

        return Case(name, measured)


def load_on_rank(
    loader: object,
    paths: Sequence[str],
    tensors: Sequence[Sequence[Any]],
    layout: str,
    state: str,
    method: str,
    is_checked: bool,
) -> Figures:
    """Loads with the other ranks into new DTensors, and compares these with the checkpoint if asked."""
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    chosen, mesh = LAYOUTS[layout], LAYOUTS[layout].mesh(dist.get_world_size())
    state_dict: dict[str, Any] = {
        spec.name: dtensor(spec, mesh, chosen.placements(spec), torch.zeros) for spec in specs
    }
    if dist.get_rank() == 0:
        size_bytes = set_page_cache(paths, state)
        if state == "cold":
            memory.claim(size_bytes)
    memory.reset_peak()
    dist.barrier()
    meter = Meter()
    load(state_dict, storage_reader=METHODS[method].reader(str(Path(paths[0]).parent)))
    figures, end = meter.figures(), time.perf_counter()
    # No rank compares while others still load.
    dist.barrier()
    if is_checked:
        check(state_dict, paths)
    return figures | {"begin": meter.begin, "end": end}


def check(state_dict: Mapping[str, DTensor], paths: Sequence[str]) -> None:
    """Compares the bits of this rank with the checkpoint.

    Raises:
        RuntimeError: They differ.
    """
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = state_dict[name]
                expected = local_part(file.get_tensor(name), tensor.device_mesh, tensor.placements)
                if not torch.equal(tensor.to_local().view(torch.int16), expected.contiguous().view(torch.int16)):
                    raise RuntimeError(f'{path}: tensor "{name}" has wrong values')


def introduction(run: Run) -> Iterator[str]:
    yield """\
All ranks call `torch.distributed.checkpoint.load` with a state dict of DTensors on the CPU, over gloo, one thread of
PyTorch each. The time of the group is from the first call to the last return. *Times* is the time of fst's reader
over this one. *CPU* and *from the disk* are sums over the ranks, and *extra memory* is the largest increase of a rank's
peak resident set, with pages of mapped files.
"""


def goals(run: Run) -> Iterator[Goal]:
    for name in sorted_names(run, "workload", "layout", "state", "ranks"):
        own, *others = (name | {"method": method} for method in METHODS)
        sizes = text.size(run.workloads[name["workload"]]["bytes"])
        title = f"Load, {sizes}, {name['layout']}, {STATES[name['state']]}, {name['ranks']} ranks"
        yield compared(run, f"{title}: at least as fast as PyTorch's reader", own, others, "seconds")


def sorted_names(run: Run, *fields: str, **name: Any) -> list[dict[str, Any]]:
    return sorted(run.names(*fields, **name), key=lambda found: tuple(found.values()))


def tables(run: Run) -> Iterator[str]:
    own = next(iter(METHODS))
    columns = [
        Column("seconds", "seconds", text.spread),
        Column("CPU", "cpu_seconds", seconds),
        Column("from the disk", "storage_bytes", size),
        Column("extra memory", "extra_bytes", size),
    ]
    for workload, layout, state in product(run.workloads, LAYOUTS, STATES):
        where = {"workload": workload, "layout": layout, "state": state}
        if not run.some(where):
            continue
        sizes = text.size(run.workloads[workload]["bytes"])
        yield f"## `dcp.load` into existing tensors, {sizes}, {LAYOUTS[layout].title}, {STATES[state]}\n"
        rows = []
        for name, (key, method) in product(sorted_names(run, "ranks", **where), METHODS.items()):
            group = where | name
            times = quotient(
                run.median(group | {"method": own}, "seconds"), run.median(group | {"method": key}, "seconds")
            )
            titles = (method.title, str(name["ranks"]), text.quotient(times) if times else "")
            rows.append((titles, group | {"method": key}))
        yield from comparison(run, ("", "ranks", "times"), rows, columns)


PARTS = {"dcp": Part("Checkpoints of torch.distributed.checkpoint", "dcp", tables, goals, introduction)}

if __name__ == "__main__":
    from .run import main

    main("dcp")
