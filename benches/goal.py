"""What fst promises in figures, and whether a run kept it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cell import Cell
from result import Figure, Run

MIB = 1 << 20
STAGING_BYTES = 256 * MIB
PEERS_TO_BEAT = ("safetensors", "fastsafetensors", "fastsafetensors-buffered")


@dataclass(frozen=True)
class Goal:
    """One promise: `measured` is to be at most `bound`, both in the unit that `show` writes."""

    text: str
    measured: float
    bound: float
    show: Callable[[float], str]

    @property
    def kept(self) -> bool:
        return self.measured <= self.bound


def goals(run: Run, seconds: Callable[[float], str], size: Callable[[float], str]) -> Iterator[Goal]:
    """The goals whose figures the run has."""

    def dense(state: str, peer: str, key: str) -> Figure | None:
        return run.figure(Cell("dense", "load", state, peer), key)

    def compare(text: str, own: Figure | None, other: Figure | None, share: float = 1.0) -> Iterator[Goal]:
        if own and other:
            yield Goal(text, own.median, other.median * share, seconds)

    warm = "Warm page cache, dense"
    for key, action in (("load_seconds", "load"), ("load_and_read_seconds", "load and read")):
        text = f"{warm}, {action}: at most the time of safetensors"
        yield from compare(text, dense("warm", "fst", key), dense("warm", "safetensors", key))
    key = "load_and_read_seconds"
    if run.device == "cpu":
        for peer in PEERS_TO_BEAT:
            text = f"Cold page cache, dense, load and read: at most the time of {peer}"
            yield from compare(text, dense("cold", "fst", key), dense("cold", peer, key))
        peak = dense("warm", "fst-pread", "peak_host_bytes")
        if peak:
            payload = run.workloads["dense"]["bytes"]
            text = "Memory of a load that reads: at most the payload and 256 MiB"
            yield Goal(text, peak.high, payload + STAGING_BYTES, size)
    own, other = (run.figure(Cell("many", "select", "warm", peer), "load_seconds") for peer in ("fst", "safetensors"))
    tensors = run.workloads.get("many", {}).get("tensors", 0)
    text = f"Ten of {tensors:,} tensors by name: at most half the time of safetensors"
    yield from compare(text, own, other, 0.5)
