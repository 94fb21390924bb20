"""One run of the bench of remote checkpoints: every service, workload and library, round by round."""

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..bench import Deadline, log, plain_environment, run_module, summary, workload_facts
from ..cell import Cell, GroupCell
from ..checkpoint import Checkpoint
from ..http_server import Counts
from ..machine import commit, load_average, machine_facts
from ..measure import Job
from ..peer import PEERS, Release, own_directory
from ..ranks.bench import Host, group_figures, trouble
from ..ranks.expected import expected_digests
from ..ranks.layout import dims
from ..ranks.task import Task
from ..result import CPU_OF_GB
from ..servers.program import MissingProgramError
from .service import CONNECTION_RATE, Far, Http, SeaweedFs, Service, lay_out

RANKED_SERVICE = "http"
RANKED_PEER = "fst"
FAR = "far"


@dataclass(frozen=True)
class Choice:
    """Selection of measurements. `before` is a library of fst whose size is compared."""

    services: Sequence[str]
    peers: Sequence[str]
    sizes: Sequence[int]
    layouts: Sequence[str]
    rounds: int
    command: str
    before: Path | None = None


class RemoteBench:
    """Run in progress: its selection and its results so far."""

    def __init__(
        self, choice: Choice, checkpoints: Mapping[str, Checkpoint], ranked: Checkpoint, out: Path, disk: Path
    ) -> None:
        self._choice = choice
        self._checkpoints = checkpoints
        self._ranked = ranked
        self._out = out / "remote.json"
        self._disk = disk
        self._deadline = Deadline(0)
        self._services: dict[str, Service] = {}
        self._errors = 0
        # A cell that failed once has no median, so it is not run again.
        self._failed: set[Cell | GroupCell] = set()
        # Reasons why the files of a workload could not be converted for a release; empty on success.
        self._converted: dict[tuple[Release | None, str], dict[str, Any]] = {}
        groups = [(layout, ranks) for layout in choice.layouts for ranks in choice.sizes]
        self._digests = {group: expected_digests(ranked, *group) for group in groups}
        self._results: dict[str, Any] = {
            "command": choice.command,
            "commit": commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": "cpu",
            "machine": machine_facts(disk),
            "load_average_before": load_average(),
            "workloads": {checkpoint.workload.name: workload_facts(checkpoint) for checkpoint in self._all()},
            "services": {},
            "library": library_facts(choice.before),
            "measurements": [],
            "ceilings": [],
        }

    def run(self, deadline: Deadline) -> bool:
        """Runs all rounds. Returns False if any library returned wrong tensors, or if fst returned none."""
        self._deadline = deadline
        with tempfile.TemporaryDirectory(dir=self._disk) as folder, ExitStack() as stack:
            self._lay_out(Path(folder, "files"), deadline)
            for name in self._choice.services:
                try:
                    service = self._start(name, Path(folder))
                except MissingProgramError as missing:
                    self._results["services"][name] = {"unavailable": str(missing)}
                    log(f"{name}: {missing}")
                    continue
                self._services[name] = stack.enter_context(closing(service))
                self._results["services"][name] = {"how": service.how}
            hosts = {}
            if RANKED_SERVICE in self._services and RANKED_PEER in self._choice.peers and self._digests:
                host = Host(RANKED_PEER, self._services[RANKED_SERVICE].environ)
                hosts[RANKED_PEER] = stack.enter_context(closing(host))
            for number in range(self._choice.rounds):
                self._run_round(number, hosts)
                if deadline.passed():
                    log(f"time is up in round {number + 1} of {self._choice.rounds}")
                    break
        return self._errors == 0

    def _all(self) -> list[Checkpoint]:
        return [*self._checkpoints.values(), self._ranked]

    def _lay_out(self, files: Path, deadline: Deadline) -> None:
        """Puts the files of all workloads, and those of peers with their own format, into the directory to serve."""
        # Variants of one release have the same format.
        converting = {PEERS[name].release: PEERS[name] for name in self._choice.peers if PEERS[name].suffix}
        for checkpoint in self._all():
            name, paths = checkpoint.workload.name, checkpoint.paths
            for release, peer in converting.items() if checkpoint is not self._ranked else ():
                log(f"converting {name} for {peer.name}")
                arguments = [peer.name, peer.suffix, *map(str, paths)]
                self._converted[release, name] = run_module("convert", arguments, peer.environment(), deadline)
            converted = [path.with_suffix(peer.suffix) for peer in converting.values() for path in paths]
            lay_out(files, checkpoint, [path for path in converted if path.exists()])

    def _start(self, name: str, directory: Path) -> Service:
        log(f"starting {name}")
        if name == "http":
            return Http(directory)
        return Far(directory) if name == FAR else SeaweedFs(directory, list(self._checkpoints.values()))

    def _run_round(self, number: int, hosts: Mapping[str, Host]) -> None:
        order = random.Random(number)
        for name, service in self._services.items():
            if not self._deadline.passed():
                self._measure_ceiling(name, service, number)
            for workload in self._checkpoints:
                peers = [peer for peer in self._choice.peers if set(PEERS[peer].schemes) & set(service.schemes)]
                for peer in order.sample(peers, len(peers)):
                    cell = Cell(workload, "load", name, peer)
                    if cell not in self._failed and not self._deadline.passed():
                        self._measure_cell(cell, service, number)
        for peer, host in hosts.items():
            for layout, ranks in self._digests:
                group = GroupCell(layout, ranks, RANKED_SERVICE, peer)
                if group not in self._failed and not self._deadline.passed():
                    self._measure_group(group, host, number)

    def _measure_ceiling(self, name: str, service: Service, number: int) -> None:
        largest = max(self._checkpoints.values(), key=lambda checkpoint: checkpoint.workload.size_bytes)
        path = max(largest.paths, key=lambda path: path.stat().st_size)
        counts = ",".join(map(str, service.connections))
        arguments = [service.plain_url(largest, path), str(path.stat().st_size), counts]
        result = run_module("remote.drain", arguments, plain_environment(), self._deadline)
        if result:
            self._results["ceilings"].append({"name": name, "round": number, **result})
            self._keep(number, f"{name}, drained", result)

    def _measure_cell(self, cell: Cell, service: Service, number: int) -> None:
        checkpoint, peer = self._checkpoints[cell.workload], PEERS[cell.peer]
        refused = self._converted.get((peer.release, cell.workload), {})
        service.reset()
        result = refused or self._load(cell, service)
        counts = service.reset()
        if not result:
            return
        if "digests" in result:
            if any(digest != checkpoint.digests["load"] for digest in result.pop("digests")):
                self._errors += 1
                result = {"failed": "the tensors are not those of the file"}
            else:
                result |= _derived(result, counts, cell.state)
        elif peer.release is None:
            # The tables list what another library cannot load. fst must load everything.
            self._errors += 1
        if "load_seconds" not in result:
            self._failed.add(cell)
        self._results["measurements"].append({**asdict(cell), "round": number, **result})
        self._keep(number, f"{cell.workload}, {cell.state}, {cell.peer}", result)

    def _load(self, cell: Cell, service: Service) -> dict[str, Any]:
        checkpoint, peer = self._checkpoints[cell.workload], PEERS[cell.peer]
        paths: Sequence[Path] = checkpoint.paths
        if peer.suffix:
            paths = [path.with_suffix(peer.suffix) for path in paths]
        scheme = next(scheme for scheme in service.schemes if scheme in peer.schemes)
        urls = service.urls(scheme, checkpoint, paths)
        job = Job(peer.name, "load", cell.state, "cpu", urls, remote_bytes=checkpoint.workload.size_bytes)
        environment = peer.environment() | service.environ
        return run_module("measure", [json.dumps(asdict(job))], environment, self._deadline)

    def _measure_group(self, cell: GroupCell, host: Host, number: int) -> None:
        service, checkpoint = self._services[RANKED_SERVICE], self._ranked
        size_bytes = sum(path.stat().st_size for path in checkpoint.paths)
        urls = service.urls("http", checkpoint, checkpoint.paths)
        service.reset()
        results = host.ask(Task(cell.ranks, "remote", urls, size_bytes, dims(checkpoint.workload, cell.layout)))
        counts = service.reset()
        result = trouble(results) or group_figures(results)
        if "load_seconds" not in result:
            self._errors += 1
            self._failed.add(cell)
        elif [rank["digest"] for rank in results] != self._digests[cell.layout, cell.ranks]:
            self._errors += 1
            result = {"failed": "the tensors are not those of the files"}
        elif counts:
            result |= asdict(counts) | {"share_of_object": counts.sent_bytes / size_bytes}
        self._results["measurements"].append({**asdict(cell), "round": number, **result})
        self._keep(number, f"{cell.layout}, {cell.ranks} ranks, {cell.state}, {cell.peer}", result)

    def _keep(self, number: int, title: str, result: Mapping[str, Any]) -> None:
        """Prints a result and writes all results so far, so that an interrupted run loses nothing."""
        log(f"round {number + 1}: {title}: {summary(result)}")
        self._results["load_average_after"] = load_average()
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self._results, indent=1) + "\n")


def _derived(result: Mapping[str, Any], counts: Counts | None, service: str) -> dict[str, Any]:
    """Returns figures that follow from those of the process and of the server."""
    derived = {CPU_OF_GB: result["cpu_seconds"] / result["tensor_bytes"] * 1e9}
    if counts is None:
        return derived
    derived |= asdict(counts)
    if service == FAR and counts.connections:
        # If every connection had sent at its rate from the beginning to the end.
        streams_seconds = result["tensor_bytes"] / (counts.connections * CONNECTION_RATE)
        derived |= {"streams_seconds": streams_seconds, "share_of_streams": streams_seconds / result["load_seconds"]}
    return derived


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
