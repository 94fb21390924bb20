"""Benchmark of loads by several ranks on the CPU."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from ..bench import Bench, Ceiling, Choice, plain_environment
from ..cell import RANKED, Cell, GroupCell, group_key
from ..checkpoint import Checkpoint
from ..directories import PACKAGE
from ..peer import PEERS
from ..workload import Workload
from .expected import needed_bytes
from .gloo import CEILINGS
from .layout import dims
from .task import Task

ENDED = "the process that starts its ranks has ended"


class Host:
    """Process that starts the ranks of a peer or of a ceiling."""

    def __init__(self, name: str, settings: Mapping[str, str] | None = None) -> None:
        environ = PEERS[name].environment() if name in PEERS else plain_environment()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.ranks.host", name],
            env=environ | dict(settings or {}) | {"OMP_NUM_THREADS": "1"},  # as torchrun does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self, cell: GroupCell, workload: Workload, paths: Sequence[str], state: str) -> dict[str, Any]:
        """Returns the figures of a group. A group is done when its last rank is."""
        results = self.ask(Task(cell.ranks, state, tuple(paths), workload.size_bytes, dims(workload, cell.layout)))
        if trouble := _trouble(results):
            return trouble
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

    def collective_rate(self, ranks: int, size_bytes: int) -> dict[str, Any]:
        """Returns the rate of a collective over this number of bytes."""
        results = self.ask(Task(ranks, "warm", (), size_bytes, {}))
        if trouble := _trouble(results):
            return trouble
        seconds = max(rank["end"] for rank in results) - min(rank["begin"] for rank in results)
        moved_bytes = sum(rank["received_bytes"] for rank in results)
        how = f"gloo, {ranks} ranks, {moved_bytes >> 20} MiB over links in one call"
        return {"bytes_per_second": moved_bytes / seconds, "how": how}

    def ask(self, task: Task) -> list[dict[str, Any]]:
        """Sends a task and returns the result of each rank."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(task.to_json(), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return [{"failed": ENDED}]
        results: list[dict[str, Any]] = json.loads(self._process.stdout.readline() or "[]")
        return results or [{"failed": ENDED}]

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
        self._hosts = {name: stack.enter_context(closing(Host(name))) for name in (*CEILINGS, *self._choice.peers)}

    def _tables(self) -> Iterator[Sequence[GroupCell | Ceiling]]:
        for ranks in self._choice.ranks:
            for name in CEILINGS:
                yield [Ceiling(f"{name}, {ranks} ranks", partial(self._collective, name, ranks))]
            for layout in self._choice.layouts:
                for state in self._choice.states or self._checkpoints[RANKED].workload.states["load"]:
                    yield [GroupCell(layout, ranks, state, peer) for peer in self._choice.peers]

    def _collective(self, name: str, ranks: int) -> dict[str, Any]:
        return self._hosts[name].collective_rate(ranks, self._checkpoints[RANKED].workload.size_bytes)

    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        assert isinstance(cell, GroupCell)
        workload = self._checkpoints[RANKED].workload
        return self._hosts[cell.peer].load(cell, workload, list(map(str, self._paths(cell))), cell.state)


def _trouble(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the reason for missing figures, if any rank has none. The rank that failed first is reported first."""
    for rank in sorted(results, key=lambda rank: rank.get("at", math.inf)):
        for key in ("unavailable", "failed"):
            if key in rank:
                return {key: rank[key]}
    return {}
