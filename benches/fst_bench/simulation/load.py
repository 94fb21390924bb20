"""Simulated loads of a model by groups of ranks, planned by fst's planner and timed by the clock."""

import time
from dataclasses import dataclass
from pathlib import Path

from ..planner import Planner, ShardRequest, Whole
from .clock import Clock, Seconds
from .cluster import Cluster
from .kept import TensorPositions
from .layout import Layout
from .model import Model, write_sparse
from .totals import Totals
from .traffic import windows


@dataclass(frozen=True)
class Load:
    """Result of a simulated load.

    Attributes:
        windows: Number of windows.
        plan_seconds: Time of the planner, on the machine of the simulation.
        seconds: Time of the load on the cluster.
        device_bytes: Largest memory of any GPU: its tensors and buffers.
        read_share: Bytes read, divided by the bytes of the checkpoint.
        sent_share: Bytes sent, divided by the bytes that ranks keep but did not read; None if there are none.
    """

    windows: int
    plan_seconds: float
    seconds: Seconds
    device_bytes: int
    read_share: float
    sent_share: float | None


class Files:
    """Files of a model, without their data."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        self.planner = Planner(write_sparse(model, folder))
        self._positions = TensorPositions(model)

    def load(self, layout: Layout, ranks: int, cluster: Cluster, window_bytes: int) -> Load:
        """Simulates a load of a layout as fst performs it."""
        requests = layout.requests(self.model, cluster.positions(ranks))
        begin = time.perf_counter()
        plan = self.planner.plan(requests, "auto", window_bytes)
        plan_seconds = time.perf_counter() - begin
        totals = Totals(ranks)
        seconds = Clock(cluster, ranks).of(totals.watch(windows(plan, ranks)))
        kept = [self._positions.kept(own, rank, ranks) for rank, own in enumerate(requests)]
        needed_bytes = totals.needed_bytes(kept)
        return Load(
            totals.windows,
            plan_seconds,
            seconds,
            totals.device_bytes(kept),
            totals.read_bytes / self.model.size_bytes,
            totals.sent_bytes / needed_bytes if needed_bytes else None,
        )

    def sent_to_all(self, ranks: int, cluster: Cluster, window_bytes: int) -> Seconds:
        """Simulates a load in which each byte is read once and sent to every rank, needed or not."""
        everything = [ShardRequest(tensor.name, Whole()) for tensor in self.model.tensors]
        plan = self.planner.plan([everything] * ranks, "exchange", window_bytes)
        return Clock(cluster, ranks).of(windows(plan, ranks))
