"""Benchmark of remote checkpoints on the loopback device."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..bench import Bench, Ceiling, Choice, log
from ..cell import RANKED, Cell, GroupCell
from ..checkpoint import Checkpoint
from ..measure import Job
from ..peer import PEERS
from ..ranks.bench import Host
from ..servers.program import MissingProgramError
from .service import CONNECTION_RATE, SERVICES, Service

RANKED_SERVICE = "http"
RANKED_PEER = "fst"


class RemoteBench(Bench):
    name = "remote"

    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        super().__init__(choice, checkpoints, out, disk)
        self._services: dict[str, Service] = {}
        self._host: Host | None = None
        self._results["services"] = {}

    def _start(self, stack: ExitStack) -> None:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._disk))) / "files"
        suffixes = {PEERS[name].suffix for name in self._choice.peers} - {""}
        for checkpoint in self._checkpoints.values():
            converted = [path.with_suffix(suffix) for suffix in suffixes for path in checkpoint.paths]
            for path in (*checkpoint.paths, *converted):
                if path.exists():
                    link = files / _name(checkpoint, path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)
        for name in self._choice.services:
            log(f"starting {name}")
            try:
                service = SERVICES[name](files)
            except MissingProgramError as missing:
                self._results["services"][name] = {"unavailable": str(missing)}
                log(f"{name}: {missing}")
                continue
            self._services[name] = stack.enter_context(closing(service))
            self._results["services"][name] = {"how": service.how}
        if RANKED_SERVICE in self._services and self._choice.ranks:
            host = Host(RANKED_PEER, self._services[RANKED_SERVICE].environ)
            self._host = stack.enter_context(closing(host))

    def _tables(self) -> Iterator[Sequence[Cell | GroupCell | Ceiling]]:
        for name in self._choice.services:
            yield [Ceiling(name, partial(self._drained, name))]
            peers = [peer for peer in self._choice.peers if SERVICES[name].scheme in PEERS[peer].schemes]
            for workload in self._checkpoints:
                if workload != RANKED:
                    yield [Cell(workload, "load", name, peer) for peer in peers]
        if RANKED_SERVICE in self._choice.services and RANKED_PEER in self._choice.peers:
            for layout in self._choice.layouts:
                yield [GroupCell(layout, ranks, RANKED_SERVICE, RANKED_PEER) for ranks in self._choice.ranks]

    def _drained(self, name: str) -> dict[str, Any]:
        if (service := self._services.get(name)) is None:
            return {}
        checkpoint, path = self._largest()
        counts = ",".join(map(str, service.connections))
        url = service.plain_url(_name(checkpoint, path))
        return self._child("remote.drain", [url, str(path.stat().st_size), counts])

    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        if (service := self._services.get(cell.state)) is None:
            return {}
        checkpoint, paths = self._checkpoints[cell.workload], self._paths(cell)
        size_bytes = checkpoint.workload.size_bytes
        urls = tuple(service.url(_name(checkpoint, path)) for path in paths)
        service.reset()
        if isinstance(cell, Cell):
            job = Job(cell.peer, cell.action, cell.state, "cpu", urls, remote_bytes=size_bytes)
            result = self._measure(job, service.environ)
        else:
            assert self._host
            result = self._host.load(cell, checkpoint.workload, urls, "remote")
        counts = service.reset()
        if counts is None or "load_seconds" not in result:
            return result
        result |= asdict(counts)
        if isinstance(cell, GroupCell):
            result["share_of_object"] = counts.sent_bytes / sum(path.stat().st_size for path in paths)
        elif cell.state == "far" and counts.connections:
            # If every connection had sent at its rate from the beginning to the end.
            streams_seconds = result["tensor_bytes"] / (counts.connections * CONNECTION_RATE)
            shares = {"streams_seconds": streams_seconds, "share_of_streams": streams_seconds / result["load_seconds"]}
            result |= shares
        return result


def _name(checkpoint: Checkpoint, path: Path) -> str:
    """Returns the name of a file in a service."""
    return f"{checkpoint.workload.name}/{path.name}"
