"""Performance goals of fst, and whether a run met them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from . import text
from .cell import Cell, GroupCell
from .peer import PEERS
from .ranks.layout import GROUP_SIZES, LAYOUTS
from .remote.service import LATENCY_SECONDS, TITLES
from .result import CPU_OF_GB, RAW_SHARE, Figure, Run

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

    If `overlaps`, `bound` is that of another library, and the figures of the two differ less than each varies. `rounds`
    is the number of rounds of a comparison with other libraries.
    """

    text: str
    measured: float | None
    bound: float | None
    show: Callable[[float], str]
    at_least: bool = False
    missing: str = "not in this run"
    overlaps: bool = False
    rounds: int = ROUNDS_MIN

    @property
    def verdict(self) -> str:
        if self.measured is None or self.bound is None:
            return f"not measured here: {self.missing}"
        kept = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        verdict = "equal" if self.overlaps else "met" if kept else "**missed**"
        return verdict if self.rounds >= ROUNDS_MIN else f"{verdict}, rounds: {self.rounds}"

    @property
    def row(self) -> list[str]:
        bound = "-" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.show(self.bound)}"
        return [self.text, "-" if self.measured is None else self.show(self.measured), bound, self.verdict]


def goals(part: str, run: Run | None) -> list[Goal]:
    """Returns all goals of a part of the page, including those that the run did not measure."""
    return list(GOALS[part](run))


def _on_gpu(run: Run | None) -> Iterator[Goal]:
    missing = "no GPU" if run is None else "not in this run"

    def at_least(name: str, measured: float | None, bound: float, show: Callable[[float], str] = text.share) -> Goal:
        return Goal(name, measured, bound, show, at_least=True, missing=missing)

    def at_most(name: str, measured: float | None, bound: float | None, show: Callable[[float], str]) -> Goal:
        return Goal(name, measured, bound, show, missing=missing)

    pinned = _rate(run, "pinned-to-device")
    for state in ("tmpfs", "warm"):
        route = f"{STATE_TITLES[state]} -> GPU"
        for key, which in (("load_seconds", ""), ("second_load_seconds", ", second load in a process")):
            own = _load_rate(run, Cell("dense", "load", state, "fst"), key)
            yield at_least(f"{route}, dense{which}: of the pinned rate", _quotient(own, pinned), HARDWARE_SHARE)
        cell = Cell("dense", "load", state, "fst")
        yield _compared(run, f"{route}, dense: ahead of every peer", cell, _peers(cell), "load_seconds", missing)
        own = _load_rate(run, Cell("moe", "load", state, "fst"))
        of_dense = _quotient(own, _load_rate(run, Cell("dense", "load", state, "fst")))
        yield at_least(f"{route}, mixture of experts: of the rate of dense", of_dense, HARDWARE_SHARE)
        name = f"{route}, mixture of experts: time a tensor beyond that of the bytes"
        yield at_most(name, _tensor_seconds(run, state, pinned), TENSOR_SECONDS, text.microseconds)
    cold = _load_rate(run, Cell("dense", "load", "cold", "fst"))
    disk = run.disk() if run else "fio"
    yield at_least(f"Cold -> GPU, dense: of the rate of {disk}", _quotient(cold, _rate(run, disk)), HARDWARE_SHARE)
    second = _median(run, Cell("adapter", "load", "warm", "fst"), "second_load_seconds")
    yield at_most("Adapter -> GPU, second load in a process", second, ADAPTER_SECONDS, text.seconds)
    cast, load = (_median(run, Cell("dense", action, "warm", "fst"), "load_seconds") for action in ("cast", "load"))
    yield at_most("Cast on load -> GPU, dense, of the time without", _quotient(cast, load), CAST_COST, text.share)
    host = run.largest("fst", "beyond_host_bytes") if run else None
    yield at_most("Host memory of a load to the GPU, largest of all", host, STAGING_BYTES, text.size)
    scratch = run.largest("fst", "device_scratch_bytes") if run else None
    yield at_most("Device memory beyond the tensors, largest of all", scratch, SCRATCH_BYTES, text.size)


def _on_cpu(run: Run | None) -> Iterator[Goal]:
    key = "load_and_read_seconds"
    own = _load_rate(run, Cell("dense", "load", "cold", "fst"), key)
    disk = run.disk() if run else "fio"
    name = f"Cold -> CPU, dense, every byte read: of the rate of {disk}"
    yield Goal(name, _quotient(own, _rate(run, disk)), HARDWARE_SHARE, text.share, at_least=True)
    for workload, title, states in (
        ("dense", "dense", ("warm", "cold", "tmpfs")),
        ("moe", "mixture of experts", ("warm", "cold", "tmpfs")),
    ):
        for state in states:
            cell = Cell(workload, "load", state, "fst")
            name = f"{STATE_TITLES[state]} -> CPU, {title}, every byte read: ahead of every peer"
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
    host = run.largest("fst-pread", "beyond_host_bytes") if run else None
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
    own = run.workloads["dense"]["bytes"] / saved if run and saved else None
    name = "Save, dense, flushed: of the rate of direct-writes"
    yield Goal(name, _quotient(own, _rate(run, "direct-writes")), WRITE_SHARE, text.share, at_least=True)
    for peer, name in (("safetensors-flushed", "flushed"), ("safetensors", "which leaves the flushing for later")):
        cells = [Cell("dense", "save", "disk", which) for which in ("fst", peer)]
        title = f"Save, dense, flushed: at least as fast as safetensors, {name}"
        yield _compared(run, title, cells[0], cells[1:], "save_seconds")
    imported = run.median("fst", "import_seconds") if run else None
    yield Goal("Import of fst beyond that of PyTorch", imported, IMPORT_SECONDS, text.seconds)


def _verified(run: Run | None) -> Iterator[Goal]:
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
        for peer, others, name in (
            ("fst-tensors", ("tensorizer", "tensorizer-8"), ".tensors: ahead of tensorizer"),
            ("fst-tensors-hashes", ("tensorizer-hashes",), ".tensors, hashes: ahead of tensorizer"),
            ("fst-tensors-encrypted", ("tensorizer-encrypted",), ".tensors, encrypted: ahead of tensorizer"),
        ):
            cells = [Cell(workload, "verified", state, which) for which in (peer, *others)]
            yield _compared(run, f"{route}, {name}", cells[0], cells[1:], key)
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


def _with_ranks(run: Run | None) -> Iterator[Goal]:
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


def _remote(run: Run | None) -> Iterator[Goal]:
    key = "load_and_read_seconds"
    for service, workload in product(("http", "s3"), ("dense", "moe")):
        cell = Cell(workload, "load", service, "fst")
        of_ceiling = _quotient(_load_rate(run, cell), _rate(run, service))
        name = f"{TITLES[service]} -> CPU, {workload}: of the rate of the server, drained"
        yield Goal(name, of_ceiling, SERVER_SHARE, text.share, at_least=True)
    for service, workload in product(TITLES, ("dense", "moe", "adapter")):
        cell = Cell(workload, "load", service, "fst")
        route = f"{TITLES[service]} -> CPU, {workload}"
        yield _compared(run, f"{route}, every byte read: ahead of every peer", cell, _peers(cell), key)
        if service != "far":
            yield _compared(run, f"{route}: CPU time of 1 GB, the least of all", cell, _peers(cell), CPU_OF_GB)
    host = run.largest("fst", "beyond_host_bytes") if run else None
    yield Goal("Remote -> CPU: host memory beyond the tensors, largest of all", host, STAGING_BYTES, text.size)
    of_streams = _median(run, Cell("dense", "load", "far", "fst"), "share_of_streams")
    name = f"{TITLES['far']} -> CPU, dense: of the rates of its connections"
    yield Goal(name, of_streams, SERVER_SHARE, text.share, at_least=True)
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
    imported = run.median("fst", "import_seconds") if run else None
    yield Goal("Import of fst beyond that of PyTorch, before remote loads", imported, IMPORT_SECONDS, text.seconds)


GOALS: dict[str, Callable[[Run | None], Iterator[Goal]]] = {
    "cpu": _on_cpu,
    "verified": _verified,
    "cuda": _on_gpu,
    "ranks": _with_ranks,
    "remote": _remote,
}


def _bytes_due(run: Run | None, cell: GroupCell, key: str) -> float | None:
    """Returns the bytes that a group must read from storage, or send."""
    if run is None:
        return None
    [facts] = run.workloads.values()
    due: dict[str, int] = facts["needed_bytes"]
    return float(facts["bytes"]) if key == "storage_bytes" else due.get(cell.result)


def _figure(run: Run | None, cell: Cell | GroupCell, key: str) -> Figure | None:
    return run.figure(cell, key) if run else None


def _median(run: Run | None, cell: Cell | GroupCell, key: str) -> float | None:
    figure = _figure(run, cell, key)
    return figure.median if figure else None


def _rate(run: Run | None, ceiling: str) -> float | None:
    figure: Figure | None = run.ceiling(ceiling) if run else None
    return figure.median if figure else None


def _load_rate(run: Run | None, cell: Cell, key: str = "load_seconds") -> float | None:
    seconds = _median(run, cell, key)
    return run.workloads[cell.workload]["bytes"] / seconds if run and seconds else None


def _tensor_seconds(run: Run | None, state: str, pinned: float | None) -> float | None:
    seconds = _median(run, Cell("moe", "load", state, "fst"), "load_seconds")
    if run is None or seconds is None or pinned is None:
        return None
    facts = run.workloads["moe"]
    return float(max(0.0, seconds - facts["bytes"] / pinned) / facts["tensors"])


def _peers(cell: Cell) -> list[Cell]:
    """Returns the same cell for every other library."""
    return [replace(cell, peer=name) for name, peer in PEERS.items() if peer.release]


def _compared(
    run: Run | None,
    name: str,
    own: Cell | GroupCell,
    others: Sequence[Cell | GroupCell],
    key: str,
    missing: str = "not in this run",
) -> Goal:
    """Returns the goal that fst is at least as fast as the fastest of the others.

    If a raw read was measured beside each load, rates are compared as shares of it, because the rate of the disk itself
    changes from one minute to the next.
    """
    shared = _figure(run, own, RAW_SHARE) is not None
    key, pick = (RAW_SHARE, max) if shared else (key, min)
    figures = [figure for cell in others if (figure := _figure(run, cell, key))]
    mine, best = _figure(run, own, key), pick(figures, key=lambda figure: figure.median, default=None)
    return Goal(
        name + (", as a share of a raw read" if shared else ""),
        mine.median if mine else None,
        best.median if best else None,
        text.share if shared else text.seconds,
        at_least=shared,
        missing=missing,
        overlaps=mine is not None and best is not None and mine.overlaps(best),
        rounds=min(mine.rounds, best.rounds) if mine and best else 0,
    )


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
