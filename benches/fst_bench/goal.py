"""Performance goals of fst, and whether a run met them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from . import text
from .cell import Cell, GroupCell
from .peer import PEERS
from .ranks.layout import LAYOUTS, needed_key
from .result import Figure, Run

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
SHARE_MOVED = 1.01  # of the bytes, including file and packet headers
GROUP_SIZES = (2, 4)
STATE_TITLES = {"warm": "Warm cache", "tmpfs": "tmpfs", "cold": "Cold"}


@dataclass(frozen=True)
class Goal:
    """Goal: `measured` must be at most, or at least, `bound`. Both are None if they were not measured."""

    text: str
    measured: float | None
    bound: float | None
    show: Callable[[float], str]
    at_least: bool = False
    missing: str = "not in this run"

    @property
    def verdict(self) -> str:
        if self.measured is None or self.bound is None:
            return f"not measured here: {self.missing}"
        kept = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return "met" if kept else "**missed**"

    @property
    def row(self) -> list[str]:
        bound = "-" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.show(self.bound)}"
        return [self.text, "-" if self.measured is None else self.show(self.measured), bound, self.verdict]


def goals(runs: Mapping[str, Run]) -> list[Goal]:
    """Returns all goals, including those that these runs did not measure."""
    return [*_on_gpu(runs.get("cuda")), *_on_cpu(runs.get("cpu")), *_with_ranks(runs.get("ranks"))]


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
        own, best = _against_peers(run, "dense", state, "load_seconds")
        yield at_most(f"{route}, dense: ahead of every peer", own, best, text.seconds)
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
            mine, best = _against_peers(run, workload, state, key)
            name = f"{STATE_TITLES[state]} -> CPU, {title}, every byte read: ahead of every peer"
            yield Goal(name, mine, best, text.seconds)
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
            ("columns", "column slices of an open file, every byte read"),
            ("pretrained", "from_pretrained, every byte read"),
        ):
            mine, theirs = (_median(run, Cell("dense", action, state, peer), key) for peer in ("fst", "safetensors"))
            yield Goal(f"{STATE_TITLES[state]} -> CPU, {name}: at most safetensors", mine, theirs, text.seconds)
    saved = _median(run, Cell("dense", "save", "disk", "fst"), "save_seconds")
    own = run.workloads["dense"]["bytes"] / saved if run and saved else None
    name = "Save, dense, flushed: of the rate of direct-writes"
    yield Goal(name, _quotient(own, _rate(run, "direct-writes")), WRITE_SHARE, text.share, at_least=True)
    for peer, name in (("safetensors-flushed", "flushed"), ("safetensors", "which leaves the flushing for later")):
        theirs = _median(run, Cell("dense", "save", "disk", peer), "save_seconds")
        yield Goal(f"Save, dense, flushed: at most safetensors, {name}", saved, theirs, text.seconds)
    imported = run.median("fst", "import_seconds") if run else None
    yield Goal("Import of fst beyond that of PyTorch", imported, IMPORT_SECONDS, text.seconds)


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
        theirs = [_median(run, GroupCell(layout, ranks, state, peer), key) for peer in others]
        bound = min((time for time in theirs if time is not None), default=None)
        for peer, which in (("fst", ""), ("fst-exchange", ", exchange")):
            mine = _median(run, GroupCell(layout, ranks, state, peer), key)
            name = f"{STATE_TITLES[state]} -> CPU, {layout} on {ranks} ranks{which}: at most fastsafetensors"
            yield Goal(name, mine, bound, text.seconds)


def _bytes_due(run: Run | None, cell: GroupCell, key: str) -> float | None:
    """Returns the bytes that a group must read from storage, or send."""
    if run is None:
        return None
    [facts] = run.workloads.values()
    due: dict[str, int] = facts["needed_bytes"]
    return float(facts["bytes"]) if key == "storage_bytes" else due.get(needed_key(cell.layout, cell.ranks))


def _median(run: Run | None, cell: Cell | GroupCell, key: str) -> float | None:
    figure = run.figure(cell, key) if run else None
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


def _against_peers(run: Run | None, workload: str, state: str, key: str) -> tuple[float | None, float | None]:
    """Returns the time of fst and the best time of the others."""
    others = [name for name, peer in PEERS.items() if peer.release]
    times = [_median(run, Cell(workload, "load", state, name), key) for name in others]
    best = min((time for time in times if time is not None), default=None)
    return _median(run, Cell(workload, "load", state, "fst"), key), best


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
