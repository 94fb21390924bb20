"""Suite of files on one device, loaded and saved by one process."""

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from .ceiling import CEILINGS, RAW_READ, ceilings_of
from .directories import TMPFS
from .loaders.base import Job
from .peer import ACTIONS, PEERS, PEERS_OF_FILES
from .peer_suite import Cell, PeerSuite, cell
from .result import RAW_RATE, RAW_SHARE
from .suite import Case, Figures, Option, Suite
from .workload import STATES, WORKLOADS_OF_FILES

TORCH_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}  # Some libraries reject a device without an index.
DEFAULT_MINUTES = {"cpu": 60.0, "cuda": 7.0}
SAVED_SUFFIX = ".saved"
TMPFS_LEFT_FREE_BYTES = 1 << 30
RAW_READ_BYTES = 512 << 20


class Files(PeerSuite):
    """Actions on the workloads, and the ceilings of the machine. Each workload has its own defaults."""

    options: ClassVar = {
        "workloads": Option(WORKLOADS_OF_FILES, WORKLOADS_OF_FILES),
        "states": Option((), STATES),
        "actions": Option((), ACTIONS),
        "peers": Option(PEERS_OF_FILES, PEERS_OF_FILES),
        "ceilings": Option(list(CEILINGS), list(CEILINGS)),
    }
    arguments: ClassVar = {"--device": {"choices": list(TORCH_DEVICES), "help": "default: both, if there is a GPU"}}
    name = "files"
    gib = ()

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        args.minutes = args.minutes or DEFAULT_MINUTES[device]
        super().__init__(args)
        self.file = self.results["device"] = device
        self._device = TORCH_DEVICES[device]
        self._tmpfs = TMPFS / f"fst-bench-{os.getpid()}"
        # Reasons why a library does not support an action, by peer and action. Each is asked once.
        self._refused: dict[tuple[str, str], Figures] = {}

    @classmethod
    def made(cls, args: argparse.Namespace) -> Iterator[Suite]:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("--device cuda: PyTorch finds no GPU here")
        for device in [args.device] if args.device else list(TORCH_DEVICES)[: 1 + torch.cuda.is_available()]:
            yield cls(argparse.Namespace(**vars(args)), device)

    def start(self, stack: ExitStack) -> None:
        super().start(stack)
        stack.callback(shutil.rmtree, self._tmpfs, ignore_errors=True)

    def tables(self) -> Iterator[Sequence[Case]]:
        args = self.args
        for ceiling in ceilings_of(self.results["device"]):
            if ceiling in args.ceilings:
                call = partial(self._ceiling, ceiling, self.largest()[1])
                yield [Case({"name": ceiling}, lambda _, call=call: call(), may_fail=True, kind="ceilings")]
        tables = (
            (name, action, state)
            for name, checkpoint in self.checkpoints.items()
            for action in ACTIONS
            if action in checkpoint.workload.states and action in (args.actions or ACTIONS)
            for state in args.states or checkpoint.workload.states[action]
            if (state == "disk") == (action == "save")
        )
        for name, action, state in tables:
            peers = (peer for peer in args.peers if action in PEERS[peer].actions)
            yield [self.case(cell(name, action, state, peer), name) for peer in peers]
            shutil.rmtree(self._tmpfs, ignore_errors=True)

    def _ceiling(self, name: str, file: Path) -> Figures:
        return self.child("ceiling:measure", name=name, path=str(file), device=self._device)

    def _raw_rate(self) -> float | None:
        """Returns the rate, in bytes per second, at which the disk delivers another file at this moment."""
        file = self.args.cache_dir / RAW_READ
        if not file.exists():
            with self.largest()[1].open("rb") as source:
                file.write_bytes(source.read(RAW_READ_BYTES))
        return self._ceiling(RAW_READ, file).get("bytes_per_second")

    def load(self, name: Cell, workload: str) -> Figures:
        peer, action, state = name["peer"], name["action"], name["state"]
        if refused := self._refused.get((peer, action)):
            return refused
        tensors, paths = self.checkpoints[workload].workload, self.paths(peer, workload)
        if state == "tmpfs":
            size_bytes = sum(path.stat().st_size for path in paths)
            if shutil.disk_usage(TMPFS).free < size_bytes + TMPFS_LEFT_FREE_BYTES:
                return {"unavailable": f"{TMPFS} has no room for it"}
            paths = [self._on_tmpfs(path) for path in paths]
        more: dict[str, Any] = {
            "load": {"repeats": tensors.repeats or self._device != "cpu"},
            "select": {"names": list(tensors.selected)},
            "slice": {"slices": list(tensors.slices)},
            "columns": {"slices": list(tensors.columns)},
            "save": {"target": str(paths[0].with_suffix(SAVED_SUFFIX))},
        }.get(action, {})
        job = Job(peer, action, state, self._device, list(map(str, paths)), **more)
        raw_rate = self._raw_rate() if state == "cold" else None
        result = self.measure(job)
        if job.target:
            Path(job.target).unlink(missing_ok=True)
        if "unavailable" in result:
            self._refused[peer, action] = result
        if raw_rate and "load_and_read_seconds" in result:
            rate = tensors.requested_bytes(action) / result["load_and_read_seconds"]
            result |= {RAW_RATE: raw_rate, RAW_SHARE: rate / raw_rate}
        return result

    def _on_tmpfs(self, path: Path) -> Path:
        copy = self._tmpfs / path.parent.name / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            # from_pretrained needs the configuration of the model and the index of its files.
            for file in (path, *path.parent.glob("*.json")):
                shutil.copyfile(file, copy.with_name(file.name))
        return copy
