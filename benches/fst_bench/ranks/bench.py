"""One run of the bench of several ranks: every cell and every ceiling, round by round."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..bench import Deadline, log, plain_environment, run_module
from ..cell import GroupCell
from ..checkpoint import Checkpoint
from ..directories import PACKAGE
from ..machine import commit, load_average, machine_facts
from ..peer import PEERS
from .expected import expected_digests, needed_bytes
from .gloo import CEILINGS
from .layout import dims, needed_key
from .task import Task

STATES = ("warm", "cold")
ENDED = "the process that starts its ranks has ended"


@dataclass(frozen=True)
class Choice:
    """Selection of measurements."""

    sizes: Sequence[int]
    layouts: Sequence[str]
    states: Sequence[str]
    peers: Sequence[str]
    rounds: int
    command: str


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


class RanksBench:
    """Run in progress: its selection and its results so far."""

    def __init__(self, choice: Choice, checkpoint: Checkpoint, out: Path) -> None:
        self._choice = choice
        self._checkpoint = checkpoint
        self._out = out / "ranks.json"
        self._errors = 0
        # A cell that failed once has no median, so it is not run again.
        self._failed: set[GroupCell] = set()
        groups = [(layout, ranks) for layout in choice.layouts for ranks in choice.sizes]
        self._digests = {group: expected_digests(checkpoint, *group) for group in groups}
        workload = checkpoint.workload
        facts = {
            "title": workload.title,
            "files": len(workload.files),
            "tensors": len(workload.tensors),
            "bytes": workload.size_bytes,
            "needed_bytes": {needed_key(*group): needed_bytes(checkpoint, *group) for group in groups},
        }
        self._results: dict[str, Any] = {
            "command": choice.command,
            "commit": commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": "cpu",
            "machine": machine_facts(checkpoint.paths[0].parent),
            "load_average_before": load_average(),
            "workloads": {workload.name: facts},
            "measurements": [],
            "ceilings": [],
        }

    def run(self, deadline: Deadline) -> bool:
        """Runs all rounds. Returns False if any library returned wrong tensors, or if fst returned none."""
        self._convert()
        hosts = {name: Host(name) for name in [*CEILINGS, *self._choice.peers]}
        try:
            for number in range(self._choice.rounds):
                self._run_round(number, hosts, deadline)
        finally:
            for host in hosts.values():
                host.close()
        return self._errors == 0

    def _convert(self) -> None:
        """Converts the files for peers that have their own format."""
        paths = [str(path) for path in self._checkpoint.paths]
        for peer in (PEERS[name] for name in self._choice.peers if PEERS[name].suffix):
            run_module("convert", [peer.name, peer.suffix, *paths], peer.environment(), Deadline(math.inf))

    def _run_round(self, number: int, hosts: Mapping[str, Host], deadline: Deadline) -> None:
        # Each round begins with a different peer, so that no peer always follows the same one.
        turn = number % len(self._choice.peers)
        peers = [*self._choice.peers[turn:], *self._choice.peers[:turn]]
        for ranks in self._choice.sizes:
            for name in CEILINGS:
                if not deadline.passed():
                    self._measure_ceiling(name, ranks, number, hosts[name])
            for layout in self._choice.layouts:
                for state in self._choice.states:
                    for peer in peers:
                        cell = GroupCell(layout, ranks, state, peer)
                        if cell not in self._failed and not deadline.passed():
                            self._measure_cell(cell, number, hosts[peer])

    def _measure_ceiling(self, name: str, ranks: int, number: int, host: Host) -> None:
        results = host.ask(self._task(name, ranks, "warm", {}))
        result = trouble(results)
        if not result:
            seconds = max(rank["end"] for rank in results) - min(rank["begin"] for rank in results)
            moved_bytes = sum(rank["received_bytes"] for rank in results)
            how = f"gloo, {ranks} ranks, {moved_bytes >> 20} MiB over links in one call"
            result = {"bytes_per_second": moved_bytes / seconds, "how": how}
        self._results["ceilings"].append({"name": f"{name}, {ranks} ranks", "round": number, **result})
        self._keep()
        log(f"round {number + 1}: {name}, {ranks} ranks: {result}")

    def _measure_cell(self, cell: GroupCell, number: int, host: Host) -> None:
        results = host.ask(self._task(cell.peer, cell.ranks, cell.state, dims(self._checkpoint.workload, cell.layout)))
        result = trouble(results) or group_figures(results)
        if "failed" not in result and "unavailable" not in result:
            if [rank["digest"] for rank in results] != self._digests[cell.layout, cell.ranks]:
                self._errors += 1
                result = {"failed": "the tensors are not those of the files"}
        elif PEERS[cell.peer].release is None:
            self._errors += 1
        if "load_seconds" not in result:
            self._failed.add(cell)
        self._results["measurements"].append({**asdict(cell), "round": number, **result})
        self._keep()
        log(f"round {number + 1}: {cell.layout}, {cell.ranks} ranks, {cell.state}, {cell.peer}: {_summary(result)}")

    def _task(self, name: str, ranks: int, state: str, cut: Mapping[str, int | None]) -> Task:
        suffix = PEERS[name].suffix if name in PEERS else ""
        paths = [path.with_suffix(suffix or path.suffix) for path in self._checkpoint.paths]
        size_bytes = sum(path.stat().st_size for path in paths)
        return Task(ranks, state, tuple(map(str, paths)), size_bytes, dict(cut))

    def _keep(self) -> None:
        """Writes all results so far, so that an interrupted run loses nothing."""
        self._results["load_average_after"] = load_average()
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self._results, indent=1) + "\n")


def trouble(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the reason for missing figures, if any rank has none. The rank that failed first is reported first."""
    for rank in sorted(results, key=lambda rank: rank.get("at", math.inf)):
        for key in ("unavailable", "failed"):
            if key in rank:
                return {key: rank[key]}
    return {}


def group_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the results of the ranks. A group is done when its last rank is."""
    seconds = max(rank["loaded"] for rank in results) - min(rank["begin"] for rank in results)
    reading = max(rank["read"] for rank in results) - min(rank["reading"] for rank in results)
    return {
        "load_seconds": seconds,
        "load_and_read_seconds": seconds + reading,
        "storage_bytes": sum(rank["storage_bytes"] for rank in results),
        "link_bytes": max(rank["link_bytes"] for rank in results),
        "beyond_host_bytes": max(rank["beyond_host_bytes"] for rank in results),
    }


def _summary(result: Mapping[str, Any]) -> str:
    if "load_seconds" not in result:
        return f"- ({result.get('unavailable') or result['failed']})"
    moved = f"{result['storage_bytes'] >> 20} MiB from the disk, {result['link_bytes'] >> 20} MiB over links"
    return f"{result['load_seconds']:.3f} s, {result['load_and_read_seconds']:.3f} s with every byte read, {moved}"
