"""Suite of remote checkpoints on the loopback device: fst and its peers."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

from . import text
from .checkpoint import Checkpoint
from .files_page import STAGING_BYTES
from .goal import Goal, at_least, compared, largest, load_rate, quotient
from .group import Host
from .layout import GROUP_SIZES
from .loaders.base import Job
from .page import Part
from .peer import PEERS, PEERS_OF_URLS
from .peer_suite import Cell, PeerSuite, cell, group_cell, group_key, others
from .ranks import TITLES as LAYOUT_TITLES
from .ranks import group_digests, load_by_ranks
from .result import CPU_OF_GB, Run
from .servers.program import MissingProgramError
from .services import CONNECTION_RATE, LATENCY_SECONDS, SERVICES, Service
from .suite import Case, Figures, Option, log
from .table import CPU, TIMES, Column, comparison, described, of_median, rate_of, share_of, size
from .workload import RANKED

TITLES = {"http": "HTTP", "s3": "S3", "far": "Far HTTP"}
SERVER_SHARE = 0.9  # of the rate at which a server is drained
NEW = " into new memory"  # after the name of a service: the rate at which it is drained into memory that is new
FLOOR_SHARE = 1.1  # of a floor, in time
ROUND_TRIPS = 4  # of a load of a small file from afar
SHARE_FETCHED = 1.005  # 1.00 of an object by all ranks together
RANKED_SERVICE, RANKED_PEER = "http", "fst"
RANKED_LAYOUTS = ("replicated", "rows")
READ = "load_and_read_seconds"


class Remote(PeerSuite):
    """Loads of URLs of services on this machine, and the rates at which these send."""

    name = "remote"
    options: ClassVar = {
        "services": Option(list(SERVICES), list(SERVICES)),
        "workloads": Option(("dense", "moe", "adapter"), ("dense", "moe", "adapter")),
        "peers": Option(PEERS_OF_URLS, PEERS_OF_URLS),
        "ranks": Option(GROUP_SIZES, GROUP_SIZES),
        "layouts": Option(RANKED_LAYOUTS, RANKED_LAYOUTS),
    }
    minutes, gib = 45, (0.25,)

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._services: dict[str, Service] = {}
        self._host: Host | None = None
        self._groups = list(product(args.layouts, args.ranks))
        self._digests = group_digests(self.checkpoints[RANKED], self._groups) if self._groups else {}
        self.results["services"] = {}

    def start(self, stack: ExitStack) -> None:
        super().start(stack)
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.args.cache_dir))) / "files"
        suffixes = {PEERS[name].suffix for name in self.args.peers} - {""}
        for checkpoint in self.checkpoints.values():
            converted = [path.with_suffix(suffix) for suffix in suffixes for path in checkpoint.paths]
            for path in (*checkpoint.paths, *converted):
                if path.exists():
                    link = files / _file(checkpoint, path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)
        for name in self.args.services:
            log(f"starting {name}")
            try:
                service = SERVICES[name][1](files)
            except MissingProgramError as missing:
                self.results["services"][name] = {"unavailable": str(missing)}
                log(f"{name}: {missing}")
                continue
            stack.enter_context(closing(service.server))
            self._services[name] = service
            self.results["services"][name] = {"how": service.how}
        if RANKED_SERVICE in self._services and self._groups:
            host = Host(RANKED_PEER, self._services[RANKED_SERVICE].environ)
            self._host = stack.enter_context(closing(host))

    def tables(self) -> Iterator[Sequence[Case]]:
        for name in self.args.services:
            for ceiling in (name, name + NEW):
                yield [Case({"name": ceiling}, partial(self._drained, ceiling), may_fail=True, kind="ceilings")]
            peers = [peer for peer in self.args.peers if SERVICES[name][0] in PEERS[peer].schemes]
            for workload in self.args.workloads:
                yield [self.case(cell(workload, "load", name, peer), workload) for peer in peers]
        if RANKED_SERVICE in self.args.services and RANKED_PEER in self.args.peers:
            for layout in self.args.layouts:
                groups = [group for group in self._groups if group[0] == layout]
                cells = ((group_cell(*group, RANKED_SERVICE, RANKED_PEER), group) for group in groups)
                yield [self.case(name, digest=self._digests[group_key(*group)]) for name, group in cells]

    def _drained(self, name: str, number: int) -> Figures:
        is_kept = name.endswith(NEW)
        if (service := self._services.get(name.removesuffix(NEW))) is None:
            return {}
        checkpoint, path = self.largest()
        url, size_bytes = service.plain_url(_file(checkpoint, path)), path.stat().st_size
        counts = list(service.connections)
        return self.child("services:drained", url=url, size_bytes=size_bytes, counts=counts, is_kept=is_kept)

    def load(self, name: Cell, workload: str) -> Figures:
        state, peer = name["state"], name["peer"]
        if (service := self._services.get(state)) is None:
            return {}
        checkpoint, paths = self.checkpoints[workload], self.paths(peer, workload)
        urls = [service.server.url(_file(checkpoint, path)) for path in paths]
        service.reset()
        if workload == RANKED:
            assert self._host
            result = load_by_ranks(self._host, name, checkpoint.workload, urls)
        else:
            job = Job(peer, "load", state, "cpu", urls, size_bytes=checkpoint.workload.size_bytes)
            result = self.measure(job, service.environ)
        counts = service.reset()
        if counts is None or "load_seconds" not in result:
            return result
        result |= asdict(counts)
        if workload == RANKED:
            result["share_of_object"] = counts.sent_bytes / sum(path.stat().st_size for path in paths)
        elif state == "far" and counts.connections:
            # If every connection had sent at its rate from the beginning to the end.
            streams_seconds = result["tensor_bytes"] / (counts.connections * CONNECTION_RATE)
            share = streams_seconds / result["load_seconds"]
            result |= {"streams_seconds": streams_seconds, "share_of_streams": share}
        return result


def _file(checkpoint: Checkpoint, path: Path) -> str:
    """Returns the name of a file in a service."""
    return f"{checkpoint.workload.name}/{path.name}"


def introduction(run: Run) -> Iterator[str]:
    yield """\
The servers run on the same machine, over the loopback device, and share its cores with what is measured. *Of the
server* is the rate of *load* as a share of that at which the same server is drained: its largest file is received by
parallel requests for ranges and not kept. *New memory* is the same, with each byte received into memory that is new,
whose pages the kernel clears: no load into new tensors can be faster. *CPU of 1 GB* is the CPU time of the process in
load + read, without the server's. *Sent* are the bytes of bodies that the server sent. *Of the connections* is the rate
as a share of what all connections that were opened allow, each at its rate from the beginning to the end. The tensors
of loads *into existing tensors* are created before the clock starts, from the header that fst reads then: the MiB of
that request is among the bytes sent, and its connection may be used again.
"""


def tables(run: Run) -> Iterator[str]:
    rows = []
    for name, facts in run.facts["services"].items():
        rate, how = run.rate(name), facts.get("how") or facts["unavailable"]
        rates = [text.rate(rate) if rate else "-" for rate in (rate, run.rate(name + NEW))]
        rows.append([TITLES[name], how, *rates, run.ceilings().get(name, "-")])
    yield "## Servers\n"
    yield from text.table(["service", "server", "drained", "new memory", "how"], rows)
    for service, workload in product(run.facts["services"], run.workloads):
        cells = [cell(workload, "load", service, name) for name in PEERS]
        if measured := [own for own in cells if run.some(own)]:
            yield from _served(run, measured, service, workload)
    if groups := run.names("layout", "ranks", "state", "peer"):
        yield "## fst.load_sharded: HTTP\n"
        columns = [
            Column("load", "load_seconds", text.spread),
            Column("sent to all ranks", "sent_bytes", size),
            Column("of the files", "share_of_object", of_median(text.quotient)),
        ]
        titled = (((f"{LAYOUT_TITLES[group['layout']]}, {group['ranks']} ranks",), group) for group in groups)
        yield from comparison(run, ("layout",), titled, columns)


def _served(run: Run, cells: Sequence[Cell], service: str, workload: str) -> Iterator[str]:
    facts, ceiling = run.workloads[workload], run.ceiling(service)
    yield f"## {workload}: {TITLES[service]}\n"
    yield f"{described(facts)}\n"
    count = of_median(lambda value: f"{value:.0f}")
    columns = [
        *TIMES,
        Column("rate", "load_seconds", rate_of(facts["bytes"])),
        *([Column("of the server", "load_seconds", share_of(facts["bytes"], ceiling))] if ceiling else []),
        CPU,
        Column("beyond", "beyond_host_bytes", size),
        Column("sent", "sent_bytes", size),
        Column("requests", "requests", count),
        Column("connections", "connections", count),
        Column("of the connections", "share_of_streams", of_median(text.share)),
    ]
    rows = [((PEERS[own["peer"]].title, run.text(own, "reader")), own) for own in cells]
    yield from comparison(run, ("library", "method"), rows, columns)
    for own in cells:
        load = run.median(own, "load_seconds")
        if load and ceiling and facts["bytes"] / load > ceiling.median:
            title = PEERS[own["peer"]].title
            yield f"- {title} is faster than the server was drained, so that the ceiling is too low.\n"


def goals(run: Run) -> Iterator[Goal]:
    for service, workload in product(("http", "s3"), ("dense", "moe")):
        route = f"{TITLES[service]} -> CPU, {workload}"
        existing = load_rate(run, cell(workload, "load", service, "fst-into"))
        title = f"{route}, existing tensors: rate over the drained server's"
        yield at_least(title, quotient(existing, run.rate(service)), SERVER_SHARE)
        new = load_rate(run, cell(workload, "load", service, "fst"))
        title = f"{route}, new tensors: rate over the server's drained into new memory"
        yield at_least(title, quotient(new, run.rate(service + NEW)), 1 / FLOOR_SHARE)
    for service, workload in product(TITLES, ("dense", "moe", "adapter")):
        own, route = cell(workload, "load", service, "fst"), f"{TITLES[service]} -> CPU, {workload}"
        yield compared(run, f"{route}, every byte read: ahead of every peer", own, others(own), READ)
        if service != "far":
            yield compared(run, f"{route}: CPU time of 1 GB, the least of all", own, others(own), CPU_OF_GB)
    host = run.largest({"peer": "fst"}, "beyond_host_bytes")
    yield Goal("Remote -> CPU: host memory beyond the tensors, largest of all", host, STAGING_BYTES, text.size)
    dense = cell("dense", "load", "far", "fst")
    title = f"{TITLES['far']} -> CPU, dense: time over {ROUND_TRIPS} round trips and its bytes as they can arrive"
    seconds, streams = run.median(dense, "load_seconds"), run.median(dense, "streams_seconds")
    floor, rate = None, run.rate("far" + NEW)
    if streams is not None and rate:
        # Server and client share the cores, which may allow less than the connections. That rate has one round trip.
        drained = run.workloads["dense"]["bytes"] / rate - LATENCY_SECONDS
        floor = ROUND_TRIPS * LATENCY_SECONDS + max(streams, drained)
    yield Goal(title, quotient(seconds, floor), FLOOR_SHARE, text.quotient)
    adapter = cell("adapter", "load", "far", "fst")
    streams = run.median(adapter, "streams_seconds")
    bound = None if streams is None else ROUND_TRIPS * LATENCY_SECONDS + streams
    title = f"{TITLES['far']} -> CPU, adapter: {ROUND_TRIPS} round trips, and its bytes over its connections"
    yield Goal(title, run.median(adapter, "load_seconds"), bound, text.seconds)
    for layout in RANKED_LAYOUTS:
        groups = (group_cell(layout, ranks, RANKED_SERVICE, RANKED_PEER) for ranks in GROUP_SIZES)
        title = f"HTTP -> CPU, {layout} on up to {max(GROUP_SIZES)} ranks: bytes sent over the files'"
        fetched = largest(run.median(group, "share_of_object") for group in groups)
        yield Goal(title, fetched, SHARE_FETCHED, text.quotient)


PARTS = {"remote": Part("Remote checkpoints", "remote", tables, goals, introduction)}
