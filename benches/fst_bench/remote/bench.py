"""Benchmark of remote checkpoints on the loopback device."""

import shutil
import subprocess
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
from ..peer import PEERS, own_directory
from ..ranks.bench import Host
from ..servers.program import MissingProgramError
from .service import CONNECTION_RATE, SERVICES, Service, lay_out

RANKED_SERVICE = "http"
RANKED_PEER = "fst"


class RemoteBench(Bench):
    name = "remote"

    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        super().__init__(choice, checkpoints, out, disk)
        self._services: dict[str, Service] = {}
        self._host: Host | None = None
        self._results |= {"services": {}, "library": library_facts(choice.before)}

    def _start(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._disk)))
        suffixes = {PEERS[name].suffix for name in self._choice.peers} - {""}
        for checkpoint in self._checkpoints.values():
            converted = [path.with_suffix(suffix) for suffix in suffixes for path in checkpoint.paths]
            lay_out(folder / "files", checkpoint, [path for path in converted if path.exists()])
        for name in self._choice.services:
            log(f"starting {name}")
            try:
                service = SERVICES[name](folder, list(self._checkpoints.values()))
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
            peers = [peer for peer in self._choice.peers if set(PEERS[peer].schemes) & set(SERVICES[name].schemes)]
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
        return self._child("remote.drain", [service.plain_url(checkpoint, path), str(path.stat().st_size), counts])

    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        if (service := self._services.get(cell.state)) is None:
            return {}
        checkpoint, paths = self._checkpoints[cell.workload], self._paths(cell)
        size_bytes = checkpoint.workload.size_bytes
        scheme = next(scheme for scheme in service.schemes if scheme in PEERS[cell.peer].schemes)
        urls = service.urls(scheme, checkpoint, paths)
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


def library_facts(before: Path | None) -> dict[str, int]:
    """Returns the size of fst's library, as built and stripped, and of an earlier one."""
    found = [path for folder in own_directory() if (path := folder / "fst/libfst_core.so").exists()]
    named = [("", path) for path in found] + ([("before_", before)] if before else [])
    facts = {}
    for prefix, path in named:
        facts[f"{prefix}bytes"] = path.stat().st_size
        if shutil.which("strip"):
            with tempfile.NamedTemporaryFile() as stripped:
                subprocess.run(["strip", "-o", stripped.name, str(path)], check=True)
                facts[f"{prefix}stripped_bytes"] = Path(stripped.name).stat().st_size
    return facts
