"""Loads of a model by groups of ranks: planned by the planner itself, timed by the clock."""

import time
from dataclasses import dataclass
from pathlib import Path

from ..planner import Planner, ShardRequest, Whole
from .clock import Clock, Seconds
from .cluster import Cluster
from .kept import Places
from .layout import Layout
from .model import Model, write_sparse
from .tally import Tally
from .traffic import windows


@dataclass(frozen=True)
class Load:
    """What a load comes to.

    Attributes:
        windows: In how many pieces it is done.
        plan_seconds: How long the planner took, on the machine of the simulation.
        seconds: What the load takes on the cluster.
        device_bytes: The most memory of any GPU: the tensors it keeps, and the buffers.
        read_share: The bytes that are read, of those of the checkpoint.
        sent_share: The bytes that are sent, of those that ranks keep and have not read; None where there are none.
    """

    windows: int
    plan_seconds: float
    seconds: Seconds
    device_bytes: int
    read_share: float
    sent_share: float | None


class Files:
    """The files of a model, without their data."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        self.planner = Planner(write_sparse(model, folder))
        self._places = Places(model)

    def load(self, layout: Layout, ranks: int, cluster: Cluster, window_bytes: int) -> Load:
        """What it takes to load a layout as fst does it."""
        requests = layout.requests(self.model, cluster.places(ranks))
        begin = time.perf_counter()
        plan = self.planner.plan(requests, "auto", window_bytes)
        plan_seconds = time.perf_counter() - begin
        tally = Tally(ranks)
        seconds = Clock(cluster, ranks).of(tally.watch(windows(plan, ranks)))
        kept = [self._places.kept(own, rank, ranks) for rank, own in enumerate(requests)]
        needed_bytes = tally.needed_bytes(kept)
        return Load(
            tally.windows,
            plan_seconds,
            seconds,
            tally.device_bytes(kept),
            tally.read_bytes / self.model.size_bytes,
            tally.sent_bytes / needed_bytes if needed_bytes else None,
        )

    def sent_to_all(self, ranks: int, cluster: Cluster, window_bytes: int) -> Seconds:
        """What it takes if each byte is read once and sent to every rank, whatever that keeps."""
        everything = [ShardRequest(tensor.name, Whole()) for tensor in self.model.tensors]
        plan = self.planner.plan([everything] * ranks, "exchange", window_bytes)
        return Clock(cluster, ranks).of(windows(plan, ranks))
