"""Base of the suites that measure fst beside other libraries."""

import argparse
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, make_checkpoint
from .loaders.base import Job
from .peer import PEERS, install_missing
from .suite import Case, Figures, Suite, log
from .workload import RANKED, WORKLOADS

# Fields that name a case.
Cell = dict[str, Any]


def cell(workload: str, action: str, state: str, peer: str) -> Cell:
    """Returns the name of a case: an action on the tensors of a workload, from one state of the files."""
    return {"workload": workload, "action": action, "state": state, "peer": peer}


def group_cell(layout: str, ranks: int, state: str, peer: str) -> Cell:
    """Returns the name of a load by several ranks."""
    return {"layout": layout, "ranks": ranks, "state": state, "peer": peer}


def others(own: Cell) -> list[Cell]:
    """Returns the same case for every other library."""
    return [own | {"peer": name} for name, peer in PEERS.items() if peer.release]


def group_key(layout: str, ranks: int) -> str:
    """Returns the key of a layout and a number of ranks in the results."""
    return f"{layout} {ranks}"


class PeerSuite(Suite):
    """Suite of libraries, whose checkpoints exist before the rounds."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        if not args.no_install:
            install_missing(args.peers)
        names = [*getattr(args, "workloads", []), *([RANKED] if getattr(args, "ranks", ()) else [])]
        if not args.peers or not names:
            raise SystemExit("nothing to measure: name at least one peer and one workload")
        log(f"making checkpoints of {args.size_bytes / (1 << 30):.2f} GiB in {args.cache_dir}")
        self.checkpoints = {name: make_checkpoint(WORKLOADS[name](args.size_bytes), args.cache_dir) for name in names}
        self.results["workloads"] = {name: made.workload.facts() for name, made in self.checkpoints.items()}
        # Reasons why the files of a workload could not be converted for a peer; empty on success.
        self._converted: dict[tuple[str, str], Figures] = {}

    def start(self, stack: ExitStack) -> None:
        """Converts the files of all workloads for peers that have their own format."""
        cells = (case.name for table in self.tables() for case in table if case.kind == "measurements")
        used = dict.fromkeys((cell["peer"], cell.get("workload", RANKED)) for cell in cells)
        for peer, workload in used:
            if PEERS[peer].suffix:
                log(f"converting {workload} for {peer}")
                job = Job(peer, "convert", "", "cpu", list(map(str, self.checkpoints[workload].paths)))
                self._converted[peer, workload] = self.measure(job)

    def measure(self, job: Job, settings: Mapping[str, str] | None = None) -> Figures:
        """Measures a job in a process with the library of its peer."""
        environment = PEERS[job.peer].environment() | dict(settings or {})
        return self.child("measure:measure", environment, job=asdict(job))

    def case(self, name: Cell, workload: str = RANKED, digest: str = "") -> Case:
        """Returns the case of a peer, which calls `load`."""
        peer = name["peer"]

        def call(number: int) -> Figures:
            return self._converted.get((peer, workload)) or self.load(name, workload)

        key = digest or self.checkpoints[workload].digests[name["action"]]
        return Case(name, call, key, may_fail=PEERS[peer].release is not None)

    @abstractmethod
    def load(self, name: Cell, workload: str) -> Figures:
        """Measures a case."""

    def paths(self, peer: str, workload: str) -> list[Path]:
        """Returns the files of a workload, in the format of a peer."""
        suffix = PEERS[peer].suffix
        return [path.with_suffix(suffix or path.suffix) for path in self.checkpoints[workload].paths]

    def largest(self) -> tuple[Checkpoint, Path]:
        """Returns the largest file of all checkpoints."""
        files = ((checkpoint, path) for checkpoint in self.checkpoints.values() for path in checkpoint.paths)
        return max(files, key=lambda file: file[1].stat().st_size)
