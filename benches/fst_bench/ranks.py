"""Suite of loads by several ranks on the CPU: fst and its peers."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from safetensors.torch import load_file

from . import memory, text
from .checkpoint import Checkpoint
from .digest import digest
from .goal import Goal, compared, largest, quotient
from .group import Host
from .layout import GROUP_SIZES, Cut, columns, replicated, rows_of_matrices
from .loaders.base import Job, Loader
from .measure import set_page_cache
from .meter import Meter, read_every_byte, start_threads
from .page import Part
from .peer import PEERS, PEERS_OF_RANKS
from .peer_suite import Cell, PeerSuite, group_cell, group_key
from .planner import Chunk, Planner, ShardRequest, Whole
from .result import Run
from .suite import Case, Figures, Option
from .table import TIMES, Column, comparison, size_of
from .workload import RANKED, Workload

SHARE_MOVED = 1.01  # of the bytes, including file and packet headers
# The default of loads to the CPU.
WINDOW_BYTES = 128 << 20
LINK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")
STATE_TITLES = {"warm": "warm page cache", "cold": "cold page cache"}
ROUTES = {"warm": "Warm cache", "cold": "Cold"}
TITLES = {
    "replicated": "every tensor on every rank",
    "rows": "matrices cut by rows",
    "columns": "matrices cut by columns",
}
CUTS: dict[str, Cut] = {"replicated": replicated, "rows": rows_of_matrices, "columns": columns}


class Ranks(PeerSuite):
    """Loads of one checkpoint by groups of two sizes, in some layouts."""

    name = "ranks"
    options: ClassVar = {
        "ranks": Option(GROUP_SIZES, GROUP_SIZES),
        "layouts": Option(list(CUTS), list(CUTS)),
        "states": Option(("warm", "cold"), ("warm", "cold")),
        "peers": Option(PEERS_OF_RANKS, PEERS_OF_RANKS),
    }
    rounds, minutes, gib = 3, 8, (0.25,)

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        groups = list(product(args.layouts, args.ranks))
        self._digests = group_digests(self.checkpoints[RANKED], groups)
        needed = {group_key(*group): needed_bytes(self.checkpoints[RANKED], *group) for group in groups}
        self.results["workloads"][RANKED]["needed_bytes"] = needed
        self._hosts: dict[str, Host] = {}

    def start(self, stack: ExitStack) -> None:
        super().start(stack)
        self._hosts = {name: stack.enter_context(closing(Host(name))) for name in self.args.peers}

    def tables(self) -> Iterator[Sequence[Case]]:
        for ranks, layout, state in product(self.args.ranks, self.args.layouts, self.args.states):
            key = self._digests[group_key(layout, ranks)]
            cells = (group_cell(layout, ranks, state, peer) for peer in self.args.peers)
            yield [self.case(name, digest=key) for name in cells]

    def load(self, name: Cell, workload: str) -> Figures:
        paths = list(map(str, self.paths(name["peer"], workload)))
        return load_by_ranks(self._hosts[name["peer"]], name, self.checkpoints[workload].workload, paths)


def dims(workload: Workload, layout: str) -> dict[str, int | None]:
    """Returns for each tensor the dimension in which it is sharded."""
    return {tensor.name: CUTS[layout](tensor) for tensor in workload.tensors}


def group_digests(checkpoint: Checkpoint, groups: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Returns the digests of the shards of all ranks, for each layout and number of ranks."""
    tensors = {name: tensor for path in checkpoint.paths for name, tensor in load_file(path).items()}
    digests = {}
    for layout, ranks in groups:
        cut = dims(checkpoint.workload, layout)
        shards = (
            {
                name: tensor if (dim := cut[name]) is None else tensor.chunk(ranks, dim)[rank].contiguous()
                for name, tensor in tensors.items()
            }
            for rank in range(ranks)
        )
        digests[group_key(layout, ranks)] = " ".join(map(digest, shards))
    return digests


def needed_bytes(checkpoint: Checkpoint, layout: str, ranks: int) -> int:
    """Returns the bytes that ranks keep but did not read, if each reads an equal part of every window."""
    cut = dims(checkpoint.workload, layout)
    requests = [ShardRequest(name, Whole() if dim is None else Chunk(dim)) for name, dim in cut.items()]
    plan = Planner(checkpoint.paths).plan([requests] * ranks, "exchange", WINDOW_BYTES)
    return sum(sum(plan.call("sent_bytes", window)[0]) for window in range(plan.call("windows")))


def load_by_ranks(host: Host, name: Cell, workload: Workload, paths: list[str]) -> Figures:
    """Returns the figures of a group. A group is done when its last rank is."""
    layout, ranks, state, peer = (name[key] for key in ("layout", "ranks", "state", "peer"))
    job = Job(peer, "sharded", state, "cpu", paths, dims=dims(workload, layout), size_bytes=workload.size_bytes)
    results = host.run("ranks:load_shards", ranks, job=asdict(job))
    if "digest" not in results[0]:
        return results[0]
    seconds = max(rank["loaded"] for rank in results) - min(rank["begin"] for rank in results)
    reading = max(rank["read"] for rank in results) - min(rank["reading"] for rank in results)
    return {
        "load_seconds": seconds,
        "load_and_read_seconds": seconds + reading,
        "storage_bytes": sum(rank["storage_bytes"] for rank in results),
        "link_bytes": max(rank["link_bytes"] for rank in results),
        "beyond_host_bytes": max(rank["beyond_host_bytes"] for rank in results),
        "digests": [" ".join(rank["digest"] for rank in results)],
    }


def load_shards(loader: Loader, job: Mapping[str, Any]) -> dict[str, Any]:
    """Loads together with the other ranks. Times are of a clock that all processes share."""
    asked = Job.of(job)
    loader.prepare(asked)
    start_threads()
    if dist.get_rank() == 0 and "://" not in asked.paths[0]:
        set_page_cache(asked.paths, asked.state)
    # Enough for a copy of all files: no layout keeps more.
    memory.claim(asked.size_bytes)
    meter = Meter()
    dist.barrier()
    link_before = int(LINK_COUNTER.read_text())
    dist.barrier()
    begin = time.perf_counter()
    tensors = loader.run(asked)
    loaded = time.perf_counter()
    dist.barrier()
    link = int(LINK_COUNTER.read_text()) - link_before
    # No rank reads every byte while others still load.
    reading = time.perf_counter()
    read_every_byte(tensors)
    read, figures = time.perf_counter(), meter.figures()
    return {
        "begin": begin,
        "loaded": loaded,
        "reading": reading,
        "read": read,
        "storage_bytes": figures["storage_bytes"],
        "link_bytes": link,
        "beyond_host_bytes": figures["extra_bytes"] - sum(tensor.nbytes for tensor in tensors.values()),
        "digest": digest(tensors),
    }


def introduction(run: Run) -> Iterator[str]:
    yield """\
Several processes of one machine load one checkpoint together over gloo. *Load* begins when all ranks begin and ends
when the last rank is done. *Disk* is the number of bytes that the kernel read for all ranks, followed by its ratio to
the checkpoint. *Links* is the number of bytes over the loopback device, followed by its ratio to the bytes that ranks
keep but did not read. Ranks of one machine share a page cache, which saves reads that ranks on several machines need.
"""


def tables(run: Run) -> Iterator[str]:
    [facts] = run.workloads.values()
    yield f"{text.size(facts['bytes'])} in {facts['tensors']} tensors in {facts['files']} files ({facts['title']}).\n"
    sizes = sorted({name["ranks"] for name in run.names("ranks")})
    for layout, ranks, state in product(TITLES, sizes, STATE_TITLES):
        if not run.some({"layout": layout, "ranks": ranks, "state": state}):
            continue
        yield f"## {ranks} ranks: {TITLES[layout]}, {STATE_TITLES[state]}\n"
        names = [name for name in PEERS if run.some({"peer": name})]
        rows = [((PEERS[name].title,), group_cell(layout, ranks, state, name)) for name in names]
        disk = Column("disk", "storage_bytes", size_of(facts["bytes"]))
        links = Column("links", "link_bytes", size_of(facts["needed_bytes"][group_key(layout, ranks)]))
        columns = [*TIMES, *([disk] if state == "cold" else []), links]
        yield from comparison(run, ("library",), rows, columns)


def goals(run: Run) -> Iterator[Goal]:
    [facts] = run.workloads.values()
    for layout in CUTS:
        exchanged = {ranks: group_cell(layout, ranks, "cold", "fst-exchange") for ranks in GROUP_SIZES}
        for key, name in (
            ("storage_bytes", "read over the checkpoint's"),
            ("link_bytes", "sent over the bytes needed"),
        ):
            shares = []
            for ranks, own in exchanged.items():
                due = facts["bytes"] if key == "storage_bytes" else facts["needed_bytes"].get(group_key(layout, ranks))
                shares.append(quotient(run.median(own, key), due))
            title = f"Ranks that exchange, {layout}, cold: bytes {name}"
            yield Goal(title, largest(shares), SHARE_MOVED, text.quotient)
    peers = [name for name in PEERS if name.startswith("fastsafetensors")]
    for layout, ranks, state in product(CUTS, GROUP_SIZES, ROUTES):
        theirs = [group_cell(layout, ranks, state, peer) for peer in peers]
        for peer, which in (("fst", ""), ("fst-exchange", ", exchange")):
            route = f"{ROUTES[state]} -> CPU, {layout} on {ranks} ranks{which}"
            own = group_cell(layout, ranks, state, peer)
            title = f"{route}: at least as fast as fastsafetensors"
            yield compared(run, title, own, theirs, "load_and_read_seconds")
        # Columns of safetensors are views of the whole file, which every use copies again.
        is_copied = layout == "columns" and run.some({"peer": "safetensors-copied"})
        other = "safetensors-copied" if is_copied else "safetensors"
        own, alone = (group_cell(layout, ranks, state, peer) for peer in ("fst", other))
        title = f"{ROUTES[state]} -> CPU, {layout} on {ranks} ranks: at least as fast as safetensors"
        yield compared(run, title, own, [alone], "load_and_read_seconds")


PARTS = {"ranks": Part("Several ranks", "ranks", tables, goals, introduction)}
