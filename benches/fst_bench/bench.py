"""Base of the benchmarks: every cell and every ceiling, round by round, each in a separate process."""

import json
import math
import os
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from .cell import Cell, GroupCell
from .checkpoint import Checkpoint
from .directories import PACKAGE
from .machine import commit, load_average, machine_facts
from .measure import Job
from .peer import CHILD_SETTINGS, PEERS

CHILD_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Choice:
    """Selection of measurements. Without `states` or `actions`, each workload is measured in its own."""

    command: str
    peers: Sequence[str]
    rounds: int
    device: str = "cpu"
    states: Sequence[str] = ()
    actions: Sequence[str] = ()
    ceilings: Sequence[str] = ()
    services: Sequence[str] = ()
    layouts: Sequence[str] = ()
    ranks: Sequence[int] = ()


class Ceiling(NamedTuple):
    """Limit of the hardware or of a server, measured once a round."""

    name: str
    measure: Callable[[], dict[str, Any]]


class Bench(ABC):
    """Run in progress: its selection and its results so far. `name` is that of the file of results."""

    name: str

    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        self._choice = choice
        self._checkpoints = checkpoints
        self._out = out
        self._disk = disk
        self._end = math.inf
        # A cell that failed once has no median, so it is not run again.
        self._failed: set[Cell | GroupCell] = set()
        # Reasons why the files of a workload could not be converted for a peer; empty on success.
        self._converted: dict[tuple[str, str], dict[str, Any]] = {}
        self._errors = 0
        self._results: dict[str, Any] = {
            "command": choice.command,
            "commit": commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": choice.device,
            "machine": machine_facts(disk),
            "load_average_before": load_average(),
            "workloads": {name: workload_facts(checkpoint) for name, checkpoint in checkpoints.items()},
            "measurements": [],
            "ceilings": [],
        }

    def run(self, seconds: float) -> bool:
        """Runs all rounds. Returns False if any library returned wrong tensors, or if fst returned none.

        The time limit does not include conversions for peers that have their own format. A measurement that is still
        running then is ended and not counted.
        """
        self._convert()
        rounds = self._choice.rounds
        log(f"{self.name}: the run ends after {rounds} rounds, or {seconds / 60:.0f} minutes")
        with ExitStack() as stack:
            self._start(stack)
            self._end = time.monotonic() + seconds
            for number in range(rounds):
                begin = time.monotonic()
                self._run_round(number)
                log(f"round {number + 1} of {rounds} took {time.monotonic() - begin:.0f} s")
                if not self._left_seconds():
                    log(f"time is up in round {number + 1} of {rounds}")
                    break
        return self._errors == 0

    @abstractmethod
    def _tables(self) -> Iterator[Sequence[Cell | GroupCell | Ceiling]]:
        """Yields the ceilings and the tables of a round in their order."""

    @abstractmethod
    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        """Measures a cell. Returns figures and digests, a reason for their absence, or {} at the time limit."""

    @abstractmethod
    def _start(self, stack: ExitStack) -> None:
        """Starts what all rounds share, and pushes its end on the stack."""

    def _left_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _convert(self) -> None:
        """Converts the files of all workloads for peers that have their own format."""
        cells = (due for table in self._tables() for due in table if not isinstance(due, Ceiling))
        for name, workload in dict.fromkeys((cell.peer, cell.workload) for cell in cells if PEERS[cell.peer].suffix):
            log(f"converting {workload} for {name}")
            paths = tuple(map(str, self._checkpoints[workload].paths))
            self._converted[name, workload] = self._measure(Job(name, "convert", "", "cpu", paths))

    def _run_round(self, number: int) -> None:
        # The rate of a disk may change in the course of a round. In a fixed order, it would be another for each peer.
        order = random.Random(number)
        for table in self._tables():
            for due in order.sample(table, len(table)):
                if not self._left_seconds():
                    return
                if isinstance(due, Ceiling):
                    self._keep("ceilings", {"name": due.name}, number, due.measure())
                elif due not in self._failed:
                    self._measure_cell(due, number)

    def _measure_cell(self, cell: Cell | GroupCell, number: int) -> None:
        result = self._converted.get((cell.peer, cell.workload)) or self._load(cell)
        if not result:
            return
        if "digests" in result:
            checkpoint = self._checkpoints[cell.workload]
            if set(result.pop("digests")) != {checkpoint.digests[cell.result]}:
                self._errors += 1
                files = "file" if len(checkpoint.paths) == 1 else "files"
                result = {"failed": f"the tensors are not those of the {files}"}
        elif PEERS[cell.peer].release is None:
            # The tables list what another library cannot load. fst must load everything.
            self._errors += 1
        if "load_seconds" not in result and "save_seconds" not in result:
            self._failed.add(cell)
        self._keep("measurements", asdict(cell), number, result)

    def _paths(self, cell: Cell | GroupCell) -> list[Path]:
        """Returns the files of a cell, in the format of its peer."""
        suffix = PEERS[cell.peer].suffix
        return [path.with_suffix(suffix or path.suffix) for path in self._checkpoints[cell.workload].paths]

    def _largest(self) -> tuple[Checkpoint, Path]:
        """Returns the largest file of all checkpoints."""
        files = ((checkpoint, path) for checkpoint in self._checkpoints.values() for path in checkpoint.paths)
        return max(files, key=lambda file: file[1].stat().st_size)

    def _measure(self, job: Job, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        environment = PEERS[job.peer].environment() | dict(environ or {})
        return self._child("measure", [json.dumps(asdict(job))], environment)

    def _child(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Returns the JSON that a module printed, {"failed": ...} if it failed, or {} at the time limit."""
        command = [sys.executable, "-m", f"{PACKAGE.name}.{module}", *arguments]
        environment = environment or plain_environment()
        timeout = min(CHILD_TIMEOUT_SECONDS, self._left_seconds())
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {CHILD_TIMEOUT_SECONDS} s"} if self._left_seconds() else {}
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return {"failed": last}
        result: dict[str, Any] = json.loads(done.stdout or "{}")
        return result

    def _keep(self, kind: str, fields: Mapping[str, Any], number: int, result: Mapping[str, Any]) -> None:
        """Prints a result and writes all results so far, so that an interrupted run loses nothing."""
        if not result:
            return
        log(f"round {number + 1}: {', '.join(map(str, fields.values()))}: {summary(result)}")
        self._results[kind].append({**fields, "round": number, **result})
        self._results["load_average_after"] = load_average()
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / f"{self.name}.json").write_text(json.dumps(self._results, indent=1) + "\n")


def workload_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describes a checkpoint for the tables."""
    workload = checkpoint.workload
    return {
        "title": workload.title,
        "files": len(workload.files),
        "tensors": len(workload.tensors),
        "bytes": workload.size_bytes,
        "selected": len(workload.selected),
        "requested_bytes": {action: workload.requested_bytes(action) for action in workload.states},
    }


def summary(result: Mapping[str, Any]) -> str:
    """Returns a result in one line."""
    if "bytes_per_second" in result:
        return f"{result['bytes_per_second'] / 1e9:.2f} GB/s"
    if "save_seconds" in result:
        return f"{result['save_seconds']:.4f} s"
    if "load_seconds" in result:
        return f"{result['load_seconds']:.4f} s, {result['load_and_read_seconds']:.4f} s with every byte read"
    return f"- ({result.get('unavailable') or result['failed']})"


def plain_environment() -> dict[str, str]:
    """Returns the environment of a process of the benchmarks that measures no library."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(PACKAGE.parent)]))
    return os.environ | CHILD_SETTINGS | {"PYTHONPATH": path}


def log(text: str) -> None:
    """Prints the progress of a run."""
    print(text, file=sys.stderr, flush=True)
