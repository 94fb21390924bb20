"""Benchmark of files on one device, by one process."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from .bench import Bench, Ceiling, Choice
from .ceiling import RAW_READ, ceilings_of
from .cell import ACTIONS, Cell, GroupCell, states_of
from .checkpoint import Checkpoint
from .directories import TMPFS
from .measure import Job
from .peer import PEERS
from .result import RAW_RATE, RAW_SHARE

TORCH_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}  # Some libraries reject a device without an index.
SAVED_SUFFIX = ".saved"
TMPFS_LEFT_FREE_BYTES = 1 << 30
RAW_READ_BYTES = 512 << 20


class FilesBench(Bench):
    def __init__(self, choice: Choice, checkpoints: Mapping[str, Checkpoint], out: Path, disk: Path) -> None:
        super().__init__(choice, checkpoints, out, disk)
        self.name = choice.device
        self._device = TORCH_DEVICES[choice.device]
        self._tmpfs = TMPFS / f"fst-bench-{os.getpid()}"
        # Reasons why a library does not support an action, by peer and action. Each is asked once.
        self._refused: dict[tuple[str, str], dict[str, Any]] = {}

    def _start(self, stack: ExitStack) -> None:
        stack.callback(shutil.rmtree, self._tmpfs, ignore_errors=True)

    def _tables(self) -> Iterator[Sequence[Cell | Ceiling]]:
        for name in ceilings_of(self._choice.device):
            if name in self._choice.ceilings:
                yield [Ceiling(name, partial(self._ceiling, name, self._largest()[1]))]
        tables = (
            (name, action, state)
            for name, checkpoint in self._checkpoints.items()
            for action in ACTIONS
            if action in checkpoint.workload.states and action in (self._choice.actions or ACTIONS)
            for state in self._choice.states or checkpoint.workload.states[action]
            if state in states_of(action)
        )
        for name, action, state in tables:
            peers = (peer for peer in self._choice.peers if action in PEERS[peer].actions)
            yield [Cell(name, action, state, peer) for peer in peers]
            shutil.rmtree(self._tmpfs, ignore_errors=True)

    def _ceiling(self, name: str, file: Path) -> dict[str, Any]:
        return self._child("ceiling", [name, str(file), self._device])

    def _raw_rate(self) -> float | None:
        """Returns the rate, in bytes per second, at which the disk delivers another file at this moment."""
        file = self._disk / RAW_READ
        if not file.exists():
            with self._largest()[1].open("rb") as source:
                file.write_bytes(source.read(RAW_READ_BYTES))
        return self._ceiling(RAW_READ, file).get("bytes_per_second")

    def _load(self, cell: Cell | GroupCell) -> dict[str, Any]:
        if refused := self._refused.get((cell.peer, cell.action)):
            return refused
        workload, paths = self._checkpoints[cell.workload].workload, self._paths(cell)
        if cell.state == "tmpfs":
            size_bytes = sum(path.stat().st_size for path in paths)
            if shutil.disk_usage(TMPFS).free < size_bytes + TMPFS_LEFT_FREE_BYTES:
                return {"unavailable": f"{TMPFS} has no room for it"}
            paths = [self._on_tmpfs(path) for path in paths]
        job = Job(
            cell.peer,
            cell.action,
            cell.state,
            self._device,
            tuple(map(str, paths)),
            names=workload.selected if cell.action == "select" else (),
            slices={"slice": workload.slices, "columns": workload.columns}.get(cell.action, ()),
            repeats=cell.action == "load" and (workload.repeats or self._device != "cpu"),
            target=str(paths[0].with_suffix(SAVED_SUFFIX)) if cell.action == "save" else "",
        )
        raw_rate = self._raw_rate() if cell.state == "cold" else None
        result = self._measure(job)
        if job.target:
            Path(job.target).unlink(missing_ok=True)
        if "unavailable" in result:
            self._refused[cell.peer, cell.action] = result
        if raw_rate and "load_and_read_seconds" in result:
            result[RAW_RATE] = raw_rate
            rate = workload.requested_bytes(cell.action) / result["load_and_read_seconds"]
            result[RAW_SHARE] = rate / raw_rate
        return result

    def _on_tmpfs(self, path: Path) -> Path:
        copy = self._tmpfs / path.parent.name / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            # from_pretrained needs the configuration of the model and the index of its files.
            for file in (path, *path.parent.glob("*.json")):
                shutil.copyfile(file, copy.with_name(file.name))
        return copy
