"""One run of the bench: every cell and every ceiling, round by round, each in a process of its own."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ceiling import CEILINGS_OF
from cell import ACTIONS, Cell
from machine import load_average, machine_facts
from measure import Job
from peer import CALM_THREADS, PEERS, REPOSITORY
from workload import WORKLOADS, Checkpoint, make_checkpoint

HERE = Path(__file__).resolve().parent
TMPFS = Path("/dev/shm/fst-bench")
TORCH_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}  # some libraries refuse a device without an index
CHILD_TIMEOUT_SECONDS = 600


class Deadline:
    """The time that a run may take; what is still running then is ended and not counted."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left_seconds() == 0


class Bench:
    """A run in progress: what is to be measured, and all that has been."""

    def __init__(self, args: argparse.Namespace, deadline: Deadline) -> None:
        self._device = args.device
        self._rounds = args.rounds
        self._deadline = deadline
        self._out = args.out / f"{args.device}.json"
        self._checkpoints = {
            name: make_checkpoint(WORKLOADS[name](args.scale), args.cache_dir) for name in args.workloads
        }
        self._cells = [
            Cell(name, action, state, peer)
            for name, checkpoint in self._checkpoints.items()
            for state in args.states
            for action in (ACTIONS if checkpoint.workload.selected else ("load",))
            for peer in args.peers
        ]
        self._missing: set[Cell] = set()
        self._errors = 0
        self._results: dict[str, Any] = {
            "command": shlex.join(["python", "benches/run.py", *sys.argv[1:]]),
            "commit": _commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": args.device,
            "scale": args.scale,
            "machine": machine_facts(args.cache_dir),
            "load_average_before": load_average(),
            "workloads": {name: _facts(checkpoint) for name, checkpoint in self._checkpoints.items()},
            "measurements": [],
            "ceilings": [],
        }

    def run(self) -> bool:
        """Runs all rounds; False if any library returned wrong tensors, or fst none."""
        try:
            for number in range(self._rounds):
                self._run_round(number)
                if self._deadline.passed():
                    print(f"time is up in round {number + 1} of {self._rounds}", file=sys.stderr)
                    break
        finally:
            shutil.rmtree(TMPFS, ignore_errors=True)
        return self._errors == 0

    def _run_round(self, number: int) -> None:
        for name in CEILINGS_OF[self._device]:
            if not self._deadline.passed():
                self._measure_ceiling(name, number)
        # Each round begins with another peer, so that none always follows the same one.
        turn = number % len(self._cells)
        for cell in self._cells[turn:] + self._cells[:turn]:
            if self._deadline.passed():
                break
            if cell not in self._missing:
                self._measure_cell(cell, number)

    def _measure_ceiling(self, name: str, number: int) -> None:
        largest = max(self._checkpoints.values(), key=lambda checkpoint: checkpoint.workload.size_bytes)
        result = self._child(
            "ceiling.py", [name, str(largest.path), TORCH_DEVICES[self._device]], os.environ | CALM_THREADS
        )
        if result:
            self._results["ceilings"].append({"name": name, "round": number, **result})
            self._keep(number, name, result)

    def _measure_cell(self, cell: Cell, number: int) -> None:
        checkpoint = self._checkpoints[cell.workload]
        names = checkpoint.workload.selected if cell.action == "select" else ()
        path = _on_tmpfs(checkpoint.path) if cell.state == "tmpfs" else checkpoint.path
        job = Job(cell.peer, cell.state, TORCH_DEVICES[self._device], str(path), names)
        result = self._child("measure.py", [json.dumps(asdict(job))], PEERS[cell.peer].environment())
        if not result:
            return
        if "unavailable" in result:
            self._missing.add(cell)
        if "load_seconds" not in result:
            # What another library cannot load is told in the tables; fst has to load everything.
            self._errors += PEERS[cell.peer].release is None
        elif result.pop("digest") != (checkpoint.selected_digest if names else checkpoint.digest):
            self._errors += 1
            result = {"failed": "the tensors are not those of the file"}
        self._results["measurements"].append({**asdict(cell), "round": number, **result})
        self._keep(number, f"{cell.workload} {cell.action}, {cell.state}, {cell.peer}", result)

    def _child(self, script: str, arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
        """What the script printed, {"failed": ...} if it did not, or nothing if the time was up."""
        command = [sys.executable, str(HERE / script), *arguments]
        timeout = min(CHILD_TIMEOUT_SECONDS, self._deadline.left_seconds())
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {} if self._deadline.passed() else {"failed": f"took more than {CHILD_TIMEOUT_SECONDS} s"}
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return {"failed": last}
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def _keep(self, number: int, what: str, result: dict[str, Any]) -> None:
        """Tells of a result and writes all so far, so that a run that is cut short loses nothing."""
        _say(number, what, result)
        self._results["load_average_after"] = load_average()
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self._results, indent=1) + "\n")


def _on_tmpfs(path: Path) -> Path:
    copy = TMPFS / path.name
    if not copy.exists():
        TMPFS.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    return copy


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    workload = checkpoint.workload
    return {
        "title": workload.title,
        "tensors": len(workload.tensors),
        "bytes": workload.size_bytes,
        "selected": len(workload.selected),
    }


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _say(number: int, what: str, result: dict[str, Any]) -> None:
    if "bytes_per_second" in result:
        told = f"{result['bytes_per_second'] / (1 << 30):.2f} GiB/s"
    elif "load_seconds" in result:
        told = f"{result['load_seconds']:.4f} s, {result['load_and_read_seconds']:.4f} s with every byte read"
    else:
        told = f"- ({result.get('unavailable') or result['failed']})"
    print(f"round {number + 1}: {what}: {told}", file=sys.stderr, flush=True)
