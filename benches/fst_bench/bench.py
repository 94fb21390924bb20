"""One run of the benchmarks on one device: every cell and every ceiling, round by round, each in a separate process."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .ceiling import RAW_READ, ceilings_of
from .cell import ACTIONS, Cell, states_of
from .checkpoint import Checkpoint
from .directories import PACKAGE, TMPFS
from .machine import commit, load_average, machine_facts
from .measure import Job
from .peer import CHILD_SETTINGS, PEERS
from .result import CPU_OF_GB, RAW_RATE, RAW_SHARE

TORCH_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}  # Some libraries reject a device without an index.
CHILD_TIMEOUT_SECONDS = 300
SAVED_SUFFIX = ".saved"
TMPFS_LEFT_FREE_BYTES = 1 << 30
RAW_READ_BYTES = 512 << 20

# For the estimate before a run only: typical cost per byte and start-up time of a measuring process.
ESTIMATED_BYTES_PER_SECOND = 0.35e9
ESTIMATED_START_SECONDS = 1.8
ESTIMATED_CEILING_SECONDS = 4.0


@dataclass(frozen=True)
class Choice:
    """Selection of measurements. Without `states`, each workload is measured in its default states.

    Without `actions`, it is measured in all that it has.
    """

    device: str
    peers: Sequence[str]
    states: Sequence[str]
    ceilings: Sequence[str]
    actions: Sequence[str]
    rounds: int
    command: str


class Deadline:
    """Time limit of a run. A measurement that is still running then is ended and not counted."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left_seconds() == 0


class Bench:
    """Run in progress: its selection and its results so far."""

    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        self._choice = choice
        self._deadline = Deadline(math.inf)
        self._out = out / f"{choice.device}.json"
        self._disk = disk
        self._checkpoints = checkpoints
        self._tmpfs = TMPFS / f"fst-bench-{os.getpid()}"
        self._ceilings = [name for name in ceilings_of(choice.device) if name in choice.ceilings]
        # A cell that failed once has no median, so it is not run again.
        self._failed: set[Cell] = set()
        # Reasons why a library does not support an action, by peer and action. Each is asked once.
        self._refused: dict[tuple[str, str], str] = {}
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

    def estimate_seconds(self) -> float:
        """Returns a rough estimate of the seconds a round takes."""
        tables = self._tables()
        seconds = ESTIMATED_CEILING_SECONDS * len(self._ceilings)
        for name, action, _ in tables:
            requested_bytes = self._checkpoints[name].workload.requested_bytes(action)
            peer_seconds = ESTIMATED_START_SECONDS + requested_bytes / ESTIMATED_BYTES_PER_SECOND
            seconds += len(self._choice.peers) * peer_seconds
        return seconds

    def convert(self) -> None:
        """Converts the files of all workloads for peers that have their own format."""
        chosen = self._choice.actions or ACTIONS
        for peer in (PEERS[name] for name in self._choice.peers if PEERS[name].suffix):
            for name, checkpoint in self._checkpoints.items():
                if not set(chosen) & set(peer.actions) & checkpoint.workload.states.keys():
                    continue
                log(f"converting {name} for {peer.name}")
                arguments = [peer.name, peer.suffix, *map(str, checkpoint.paths)]
                self._converted[peer.name, name] = run_module("convert", arguments, peer.environment(), self._deadline)

    def run(self, deadline: Deadline) -> bool:
        """Runs all rounds. Returns False if any library returned wrong tensors, or if fst returned none."""
        self._deadline = deadline
        try:
            for number in range(self._choice.rounds):
                begin = time.monotonic()
                self._run_round(number)
                log(f"round {number + 1} of {self._choice.rounds} took {time.monotonic() - begin:.0f} s")
                if self._deadline.passed():
                    log(f"time is up in round {number + 1} of {self._choice.rounds}")
                    break
        finally:
            shutil.rmtree(self._tmpfs, ignore_errors=True)
        return self._errors == 0

    def _run_round(self, number: int) -> None:
        for name in self._ceilings:
            if not self._deadline.passed():
                self._measure_ceiling(name, number)
        # The rate of a disk may change in the course of a round. In a fixed order, it would be another for each peer.
        order = random.Random(number)
        for workload, action, state in self._tables():
            for peer in order.sample(self._choice.peers, len(self._choice.peers)):
                cell = Cell(workload, action, state, peer)
                is_due = action in PEERS[peer].actions and cell not in self._failed
                if is_due and not self._deadline.passed():
                    self._measure_cell(cell, number)
            if state == "tmpfs":
                shutil.rmtree(self._tmpfs, ignore_errors=True)

    def _tables(self) -> list[tuple[str, str, str]]:
        return [
            (name, action, state)
            for name, checkpoint in self._checkpoints.items()
            for action in ACTIONS
            if action in checkpoint.workload.states and action in (self._choice.actions or ACTIONS)
            for state in (self._choice.states or checkpoint.workload.states[action])
            if state in states_of(action)
        ]

    def _measure_ceiling(self, name: str, number: int) -> None:
        result = self._ceiling(name, self._largest())
        if result:
            self._results["ceilings"].append({"name": name, "round": number, **result})
            self._keep(number, name, result)

    def _largest(self) -> Path:
        paths = [path for checkpoint in self._checkpoints.values() for path in checkpoint.paths]
        return max(paths, key=lambda path: path.stat().st_size)

    def _ceiling(self, name: str, file: Path) -> dict[str, Any]:
        arguments = [name, str(file), TORCH_DEVICES[self._choice.device]]
        return run_module("ceiling", arguments, plain_environment(), self._deadline)

    def _raw_rate(self) -> float | None:
        """Returns the rate, in bytes per second, at which the disk delivers another file at this moment."""
        file = self._disk / RAW_READ
        if not file.exists():
            with self._largest().open("rb") as source:
                file.write_bytes(source.read(RAW_READ_BYTES))
        return self._ceiling(RAW_READ, file).get("bytes_per_second")

    def _measure_cell(self, cell: Cell, number: int) -> None:
        raw_rate = self._raw_rate() if cell.state == "cold" else None
        result = self._load(cell)
        if not result:
            return
        if "cpu_seconds" in result:
            result[CPU_OF_GB] = result["cpu_seconds"] / result["tensor_bytes"] * 1e9
        if raw_rate and "load_and_read_seconds" in result:
            requested_bytes = self._checkpoints[cell.workload].workload.requested_bytes(cell.action)
            result[RAW_RATE] = raw_rate
            result[RAW_SHARE] = requested_bytes / result["load_and_read_seconds"] / raw_rate
        if "digests" in result:
            right = self._checkpoints[cell.workload].digests[cell.action]
            if any(digest != right for digest in result.pop("digests")):
                self._errors += 1
                result = {"failed": "the tensors are not those of the file"}
        elif PEERS[cell.peer].release is None:
            # The tables list what another library cannot load. fst must load everything.
            self._errors += 1
        if "load_seconds" not in result and "save_seconds" not in result:
            self._failed.add(cell)
        self._results["measurements"].append({**asdict(cell), "round": number, **result})
        self._keep(number, f"{cell.workload} {cell.action}, {cell.state}, {cell.peer}", result)

    def _load(self, cell: Cell) -> dict[str, Any]:
        if (cell.peer, cell.action) in self._refused:
            return {"unavailable": self._refused[cell.peer, cell.action]}
        checkpoint = self._checkpoints[cell.workload]
        workload, peer = checkpoint.workload, PEERS[cell.peer]
        paths: Sequence[Path] = checkpoint.paths
        if peer.suffix:
            if refused := self._converted[cell.peer, cell.workload]:
                return refused
            paths = [path.with_suffix(peer.suffix) for path in paths]
        if cell.state == "tmpfs":
            size_bytes = sum(path.stat().st_size for path in paths)
            if shutil.disk_usage(TMPFS).free < size_bytes + TMPFS_LEFT_FREE_BYTES:
                return {"unavailable": f"{TMPFS} has no room for it"}
            paths = list(self._on_tmpfs(paths))
        job = Job(
            cell.peer, cell.action, cell.state, TORCH_DEVICES[self._choice.device], tuple(str(path) for path in paths)
        )
        if cell.action == "select":
            job = replace(job, names=workload.selected)
        elif cell.action == "slice":
            job = replace(job, slices=workload.slices)
        elif cell.action == "columns":
            job = replace(job, slices=workload.columns)
        elif cell.action == "save":
            job = replace(job, target=str(paths[0].with_suffix(SAVED_SUFFIX)))
        elif cell.action == "load":
            job = replace(job, repeats=workload.repeats or self._choice.device != "cpu")
        result = run_module("measure", [json.dumps(asdict(job))], peer.environment(), self._deadline)
        if job.target:
            Path(job.target).unlink(missing_ok=True)
        if "unavailable" in result:
            self._refused[cell.peer, cell.action] = result["unavailable"]
        return result

    def _on_tmpfs(self, paths: Sequence[Path]) -> Iterator[Path]:
        for path in paths:
            copy = self._tmpfs / path.parent.name / path.name
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                # from_pretrained needs the configuration of the model and the index of its files.
                for file in (path, *path.parent.glob("*.json")):
                    shutil.copyfile(file, copy.with_name(file.name))
            yield copy

    def _keep(self, number: int, title: str, result: dict[str, Any]) -> None:
        """Prints a result and writes all results so far, so that an interrupted run loses nothing."""
        log(f"round {number + 1}: {title}: {summary(result)}")
        self._results["load_average_after"] = load_average()
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self._results, indent=1) + "\n")


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


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], deadline: Deadline
) -> dict[str, Any]:
    """Returns the JSON that a module printed, {"failed": ...} if it failed, or {} at the time limit."""
    command = [sys.executable, "-m", f"{PACKAGE.name}.{module}", *arguments]
    timeout = min(CHILD_TIMEOUT_SECONDS, deadline.left_seconds())
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {} if deadline.passed() else {"failed": f"took more than {CHILD_TIMEOUT_SECONDS} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"failed": last}
    result: dict[str, Any] = json.loads(done.stdout or "{}")
    return result


def plain_environment() -> dict[str, str]:
    """Returns the environment of a process of the benchmarks that measures no library."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(PACKAGE.parent)]))
    return os.environ | CHILD_SETTINGS | {"PYTHONPATH": path}


def log(text: str) -> None:
    """Prints the progress of a run."""
    print(text, file=sys.stderr, flush=True)
