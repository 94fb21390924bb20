"""Benchmark of loads by several ranks on the CPU."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench import Bench, Choice
from ..cell import RANKED, Cell, GroupCell, group_key
from ..checkpoint import Checkpoint
from ..directories import PACKAGE
from ..peer import PEERS
from ..workload import Workload
from .expected import needed_bytes
from .layout import dims
from .rank import Task


class Host:
    """Process that starts the ranks of a peer."""

    def __init__(self, peer: str, settings: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.ranks.host", peer],
            env=PEERS[peer].environment() | dict(settings or {}) | {"OMP_NUM_THREADS": "1"},  # as torchrun does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self, cell: GroupCell, workload: Workload, paths: Sequence[str], state: str) -> dict[str, Any]:
        """Returns the figures of a group. A group is done when its last rank is."""
        task = Task(cell.ranks, state, list(paths), workload.size_bytes, dims(workload, cell.layout))
        results = self._ask(task)
        # The rank that failed first has the reason.
        for rank in sorted(results, key=lambda rank: rank.get("at", math.inf)):
            if "digest" not in rank:
                return {key: rank[key] for key in ("unavailable", "failed") if key in rank}
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

    def _ask(self, task: Task) -> list[dict[str, Any]]:
        """Sends a task and returns the result of each rank."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps(asdict(task)), file=self._process.stdin, flush=True)
        results: list[dict[str, Any]] = json.loads(self._process.stdout.readline() or "[]")
        return results or [{"failed": "the process that starts its ranks has ended"}]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


class RanksBench(Bench):
    name = "ranks"

    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        super().__init__(choice, checkpoints, out, disk)
        self._hosts: dict[str, Host] = {}
        self._results["workloads"][RANKED]["needed_bytes"] = {
            group_key(layout, ranks): needed_bytes(checkpoints[RANKED], layout, ranks)
            for layout in choice.layouts
            for ranks in choice.ranks
        }

    def _start(self, stack: ExitStack) -> None:
        self._hosts = {name: stack.enter_context(closing(Host(name))) for name in self._choice.peers}

    def _tables(self) -> Iterator[Sequence[GroupCell]]:
        for ranks in self._choice.ranks:
            for layout in self._choice.layouts:
                for state in self._choice.states or self._checkpoints[RANKED].workload.states["load"]:
                    yield [GroupCell(layout, ranks, state, peer) for peer in self._choice.peers]

    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        assert isinstance(cell, GroupCell)
        workload = self._checkpoints[RANKED].workload
        return self._hosts[cell.peer].load(cell, workload, list(map(str, self._paths(cell))), cell.state)
