"""Performance goals of fst, and whether a run met them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from . import text
from .ceiling import DISK
from .cell import Cell, GroupCell
from .peer import PEERS
from .ranks.layout import GROUP_SIZES, LAYOUTS
from .remote.service import LATENCY_SECONDS, TITLES
from .result import CPU_OF_GB, RAW_SHARE, Run

MIB = 1 << 20
STAGING_BYTES = 256 * MIB
SCRATCH_BYTES = 64 * MIB
HARDWARE_SHARE = 0.95
CAST_COST = 1.03
TENSOR_SECONDS = 5e-6
ADAPTER_SECONDS = 2e-3
SELECT_SHARE = 0.5
WRITE_SHARE = 0.9
IMPORT_SECONDS = 0.05
ROUNDS_MIN = 7  # of a comparison that is a claim
SHARE_MOVED = 1.01  # of the bytes, including file and packet headers
SERVER_SHARE = 0.9  # of the rate at which a server is drained, and of that of its connections
ROUND_TRIPS = 4  # of a load of a small file from afar
VERIFIED_SHARE = 0.5  # of the time of a program that verifies a file before another loads it
VERIFICATION_COST = 1.1  # of the CPU time of hashing or decrypting alone
SHARE_FETCHED = 1.005  # 1.00 of an object by all ranks together
STATE_TITLES = {"warm": "Warm cache", "tmpfs": "tmpfs", "cold": "Cold"}


@dataclass(frozen=True)
class Goal:
    """Goal: `measured` must be at most, or at least, `bound`. Both are None if they were not measured.

    If `overlaps`, `bound` is that of another library, or of a quotient with it, and the figures of the two differ less
    than each varies. `rounds` is the number of rounds of a comparison with other libraries.
    """

    text: str
    measured: float | None
    bound: float | None
    show: Callable[[float], str]
    at_least: bool = False
    overlaps: bool = False
    rounds: int = ROUNDS_MIN

    @property
    def verdict(self) -> str:
        if self.measured is None or self.bound is None:
            return "not measured here: not in this run"
        kept = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        verdict = "equal" if self.overlaps else "met" if kept else "**missed**"
        return verdict if self.rounds >= ROUNDS_MIN else f"{verdict}, rounds: {self.rounds}"

    @property
    def row(self) -> list[str]:
        bound = "-" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.show(self.bound)}"
        return [self.text, "-" if self.measured is None else self.show(self.measured), bound, self.verdict]


def goals(part: str, run: Run) -> list[Goal]:
    """Returns all goals of a part of the page, including those that the run did not measure."""
    return list(GOALS[part](run))


def _on_gpu(run: Run) -> Iterator[Goal]:
    pinned = _rate(run, "pinned-to-device")
    for state in ("tmpfs", "warm"):
        route = f"{STATE_TITLES[state]} -> GPU"
        dense, moe = (Cell(workload, "load", state, "fst") for workload in ("dense", "moe"))
        for key, which in (("load_seconds", ""), ("second_load_seconds", ", second load in a process")):
            share = _quotient(_load_rate(run, dense, key), pinned)
            yield _at_least(f"{route}, dense{which}: of the pinned rate", share, HARDWARE_SHARE)
        yield _compared(run, f"{route}, dense: ahead of every peer", dense, _peers(dense), "load_seconds")
        of_dense = _quotient(_load_rate(run, moe), _load_rate(run, dense))
        yield _at_least(f"{route}, mixture of experts: of the rate of dense", of_dense, HARDWARE_SHARE)
        name = f"{route}, mixture of experts: time a tensor beyond that of the bytes"
        yield Goal(name, _tensor_seconds(run, moe, pinned), TENSOR_SECONDS, text.microseconds)
    cold = _load_rate(run, Cell("dense", "load", "cold", "fst"))
    yield _at_least(f"Cold -> GPU, dense: of the rate of {DISK}", _quotient(cold, _rate(run, DISK)), HARDWARE_SHARE)
    second = _median(run, Cell("adapter", "load", "warm", "fst"), "second_load_seconds")
    yield Goal("Adapter -> GPU, second load in a process", second, ADAPTER_SECONDS, text.seconds)
    cast, load = (_median(run, Cell("dense", action, "warm", "fst"), "load_seconds") for action in ("cast", "load"))
    yield Goal("Cast on load -> GPU, dense, of the time without", _quotient(cast, load), CAST_COST, text.share)
    host = run.largest("fst", "beyond_host_bytes")
    yield Goal("Host memory of a load to the GPU, largest of all", host, STAGING_BYTES, text.size)
    scratch = run.largest("fst", "device_scratch_bytes")
    yield Goal("Device memory beyond the tensors, largest of all", scratch, SCRATCH_BYTES, text.size)


def _on_cpu(run: Run) -> Iterator[Goal]:
    key = "load_and_read_seconds"
    own = _quotient(_load_rate(run, Cell("dense", "load", "cold", "fst"), key), _rate(run, DISK))
    yield _at_least(f"Cold -> CPU, dense, every byte read: of the rate of {DISK}", own, HARDWARE_SHARE)
    titles = {"dense": "dense", "moe": "mixture of experts"}
    for workload, state in product(titles, ("warm", "cold", "tmpfs")):
        cell = Cell(workload, "load", state, "fst")
        name = f"{STATE_TITLES[state]} -> CPU, {titles[workload]}, every byte read: ahead of every peer"
        yield _compared(run, name, cell, _peers(cell), key)
    mine, theirs = (
        _median(run, Cell("many", "select", "warm", peer), "load_seconds") for peer in ("fst", "safetensors")
    )
    bound = None if theirs is None else theirs * SELECT_SHARE
    yield Goal("Ten tensors of `many` by name -> CPU: half the time of safetensors", mine, bound, text.seconds)
    cast = _median(run, Cell("dense", "cast", "warm", "fst"), key)
    load = _median(run, Cell("dense", "load", "warm", "fst-pread"), key)
    name = "Cast on load -> CPU, dense, of the time of reading into memory without"
    yield Goal(name, _quotient(cast, load), CAST_COST, text.share)
    host = run.largest("fst-pread", "beyond_host_bytes")
    yield Goal("Host memory beyond the tensors of a load that reads, largest of all", host, STAGING_BYTES, text.size)
    for state in ("warm", "cold"):
        for action, name in (
            ("slice", "slices of one rank of eight, every byte read"),
            ("columns", "column slices of an open file, every byte read"),
            ("pretrained", "from_pretrained, every byte read"),
        ):
            cells = [Cell("dense", action, state, peer) for peer in ("fst", "safetensors")]
            title = f"{STATE_TITLES[state]} -> CPU, {name}: at least as fast as safetensors"
            yield _compared(run, title, cells[0], cells[1:], key)
    saved = _median(run, Cell("dense", "save", "disk", "fst"), "save_seconds")
    own = _quotient(run.workloads["dense"]["bytes"] / saved if saved else None, _rate(run, "direct-writes"))
    yield _at_least("Save, dense, flushed: of the rate of direct-writes", own, WRITE_SHARE)
    for peer, name in (("safetensors-flushed", "flushed"), ("safetensors", "which leaves the flushing for later")):
        cells = [Cell("dense", "save", "disk", which) for which in ("fst", peer)]
        title = f"Save, dense, flushed: at least as fast as safetensors, {name}"
        yield _compared(run, title, cells[0], cells[1:], "save_seconds")
    imported = run.median("fst", "import_seconds")
    yield Goal("Import of fst beyond that of PyTorch", imported, IMPORT_SECONDS, text.seconds)


def _verified(run: Run) -> Iterator[Goal]:
    """Yields the goals of loads that verify or decrypt."""
    key = "load_and_read_seconds"
    for workload, state in product(("dense", "moe"), ("warm", "cold")):
        route = f"{STATE_TITLES[state]} -> CPU, {workload}"
        for peer, other, name in (
            ("fst-manifest", "sha256sum-first", "manifest: half the time of sha256sum, then safetensors"),
            ("fst-signature", "model-signing-first", "signature: half the time of model-signing, then safetensors"),
        ):
            mine, theirs = (_median(run, Cell(workload, "verified", state, which), key) for which in (peer, other))
            bound = None if theirs is None else theirs * VERIFIED_SHARE
            yield Goal(f"{route}, {name}", mine, bound, text.seconds)
        for suffix, others, which in (
            ("", ("tensorizer", "tensorizer-8"), ""),
            ("-hashes", ("tensorizer-hashes",), ", hashes"),
            ("-encrypted", ("tensorizer-encrypted",), ", encrypted"),
        ):
            cells = [Cell(workload, "verified", state, peer) for peer in (f"fst-tensors{suffix}", *others)]
            yield _compared(run, f"{route}, .tensors{which}: ahead of tensorizer", cells[0], cells[1:], key)
    cells = [Cell("dense", "verified", "cold", peer) for peer in ("fst-blake3", "fst-pread")]
    yield _compared(run, "Cold -> CPU, dense, digests: at least as fast as without", cells[0], cells[1:], key)
    # Each beside the load that reads in the same way.
    for peer, plain, algorithm, name in (
        ("fst-sha256", "fst", "sha256", "digests, SHA-256: CPU time of 1 GB beyond a plain load, of that of OpenSSL"),
        (
            "fst-encrypted",
            "fst-pread",
            "aes-256-gcm",
            "encrypted: CPU time of 1 GB beyond that without, of that of OpenSSL",
        ),
    ):
        cells = [Cell("dense", "verified", "warm", which) for which in (peer, plain)]
        (with_it, without), alone = (_median(run, cell, CPU_OF_GB) for cell in cells), _rate(run, algorithm)
        beyond = None if with_it is None or without is None else max(0.0, with_it - without)
        share = None if beyond is None or alone is None else beyond / (1e9 / alone)
        yield Goal(f"Warm cache -> CPU, dense, {name}", share, VERIFICATION_COST, text.share)


def _with_ranks(run: Run) -> Iterator[Goal]:
    for layout in LAYOUTS:
        exchanged = [GroupCell(layout, ranks, "cold", "fst-exchange") for ranks in GROUP_SIZES]
        for key, name in (
            ("storage_bytes", "read over those of the checkpoint"),
            ("link_bytes", "sent over those needed"),
        ):
            shares = [_quotient(_median(run, cell, key), _bytes_due(run, cell, key)) for cell in exchanged]
            largest = max((share for share in shares if share is not None), default=None)
            yield Goal(f"Ranks that exchange, {layout}, cold: bytes {name}", largest, SHARE_MOVED, text.quotient)
    key = "load_and_read_seconds"
    others = [name for name in PEERS if name.startswith("fastsafetensors")]
    for layout, ranks, state in product(LAYOUTS, GROUP_SIZES, ("warm", "cold")):
        theirs = [GroupCell(layout, ranks, state, peer) for peer in others]
        for peer, which in (("fst", ""), ("fst-exchange", ", exchange")):
            name = (
                f"{STATE_TITLES[state]} -> CPU, {layout} on {ranks} ranks{which}: at least as fast as fastsafetensors"
            )
            yield _compared(run, name, GroupCell(layout, ranks, state, peer), theirs, key)


def _remote(run: Run) -> Iterator[Goal]:
    key = "load_and_read_seconds"
    for service, workload in product(("http", "s3"), ("dense", "moe")):
        for peer, which in (("fst-into", "existing"), ("fst", "new")):
            cell = Cell(workload, "load", service, peer)
            of_ceiling = _quotient(_load_rate(run, cell), _rate(run, service))
            name = f"{TITLES[service]} -> CPU, {workload}, {which} tensors: of the rate of the server, drained"
            yield _at_least(name, of_ceiling, SERVER_SHARE)
    for service, workload in product(TITLES, ("dense", "moe", "adapter")):
        cell = Cell(workload, "load", service, "fst")
        route = f"{TITLES[service]} -> CPU, {workload}"
        yield _compared(run, f"{route}, every byte read: ahead of every peer", cell, _peers(cell), key)
        if service != "far":
            yield _compared(run, f"{route}: CPU time of 1 GB, the least of all", cell, _peers(cell), CPU_OF_GB)
    host = run.largest("fst", "beyond_host_bytes")
    yield Goal("Remote -> CPU: host memory beyond the tensors, largest of all", host, STAGING_BYTES, text.size)
    of_streams = _median(run, Cell("dense", "load", "far", "fst"), "share_of_streams")
    name = f"{TITLES['far']} -> CPU, dense: of the rates of its connections"
    yield _at_least(name, of_streams, SERVER_SHARE)
    adapter = Cell("adapter", "load", "far", "fst")
    streams = _median(run, adapter, "streams_seconds")
    bound = None if streams is None else ROUND_TRIPS * LATENCY_SECONDS + streams
    name = f"{TITLES['far']} -> CPU, adapter: {ROUND_TRIPS} round trips, and its bytes over its connections"
    yield Goal(name, _median(run, adapter, "load_seconds"), bound, text.seconds)
    for layout in ("replicated", "rows"):
        shares = [_median(run, GroupCell(layout, ranks, "http", "fst"), "share_of_object") for ranks in GROUP_SIZES]
        largest = max((share for share in shares if share is not None), default=None)
        name = f"HTTP -> CPU, {layout} on up to {max(GROUP_SIZES)} ranks: bytes sent over those of the files"
        yield Goal(name, largest, SHARE_FETCHED, text.quotient)
    imported = run.median("fst", "import_seconds")
    yield Goal("Import of fst beyond that of PyTorch, before remote loads", imported, IMPORT_SECONDS, text.seconds)


GOALS: dict[str, Callable[[Run], Iterator[Goal]]] = {
    "cpu": _on_cpu,
    "verified": _verified,
    "cuda": _on_gpu,
    "ranks": _with_ranks,
    "remote": _remote,
}


def _bytes_due(run: Run, cell: GroupCell, key: str) -> float | None:
    """Returns the bytes that a group must read from storage, or send."""
    [facts] = run.workloads.values()
    due: dict[str, int] = facts["needed_bytes"]
    return float(facts["bytes"]) if key == "storage_bytes" else due.get(cell.result)


def _median(run: Run, cell: Cell | GroupCell, key: str) -> float | None:
    figure = run.figure(cell, key)
    return figure.median if figure else None


def _rate(run: Run, ceiling: str) -> float | None:
    figure = run.ceiling(ceiling)
    return figure.median if figure else None


def _at_least(name: str, share: float | None, bound: float) -> Goal:
    return Goal(name, share, bound, text.share, at_least=True)


def _load_rate(run: Run, cell: Cell, key: str = "load_seconds") -> float | None:
    seconds = _median(run, cell, key)
    return run.workloads[cell.workload]["bytes"] / seconds if seconds else None


def _tensor_seconds(run: Run, cell: Cell, pinned: float | None) -> float | None:
    """Returns the time of a tensor beyond that of its bytes at the pinned rate."""
    seconds = _median(run, cell, "load_seconds")
    if seconds is None or pinned is None:
        return None
    facts = run.workloads[cell.workload]
    return float(max(0.0, seconds - facts["bytes"] / pinned) / facts["tensors"])


def _peers(cell: Cell) -> list[Cell]:
    """Returns the same cell for every other library."""
    return [replace(cell, peer=name) for name, peer in PEERS.items() if peer.release]


def _compared(
    run: Run,
    name: str,
    own: Cell | GroupCell,
    others: Sequence[Cell | GroupCell],
    key: str,
) -> Goal:
    """Returns the goal that fst is at least as fast as the fastest of the others.

    If a raw read was measured beside each load, rates are compared as shares of it, because the rate of the disk itself
    changes from one minute to the next.
    """
    shared = run.figure(own, RAW_SHARE) is not None
    key, pick = (RAW_SHARE, max) if shared else (key, min)
    figures = [figure for cell in others if (figure := run.figure(cell, key))]
    mine, best = run.figure(own, key), pick(figures, key=lambda figure: figure.median, default=None)
    return Goal(
        name + (", as a share of a raw read" if shared else ""),
        mine.median if mine else None,
        best.median if best else None,
        text.share if shared else text.seconds,
        at_least=shared,
        overlaps=mine is not None and best is not None and mine.overlaps(best),
        rounds=min(mine.rounds, best.rounds) if mine and best else 0,
    )


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
