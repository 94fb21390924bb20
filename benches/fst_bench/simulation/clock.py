"""Simulated time of the windows of a plan on a cluster."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cluster import Cluster
from .traffic import Window

# Seconds for which each resource is in use.
Use = dict[str, float]


@dataclass(frozen=True)
class Seconds:
    """Simulated seconds of a load.

    Attributes:
        read: All reads, if nothing else ran.
        exchange: All collectives, if nothing else ran.
        total: Reads and collectives, overlapped as the windows allow, and copies of received bytes.
        bottleneck: Resource that is at its limit for the longest time.
    """

    read: float
    exchange: float
    total: float
    bottleneck: str


class Clock:
    """Clock for a group of ranks that fill one node after the other.

    Only bytes take time. Users of a shared resource take turns, and a window ends when all ranks have finished it.
    """

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._node_of = torch.arange(ranks) // cluster.node_ranks
        self._same_node = self._node_of[:, None] == self._node_of[None, :]

    def of(self, windows: Iterable[Window]) -> Seconds:
        """Returns the time of a load with these windows."""
        read = exchange = total = 0.0
        limited: Use = defaultdict(float)  # seconds for which each resource is the limit
        # As in fst: during the collective of a window, the next one is read and the previous one is copied.
        moving: Use = {}
        arriving: Use = {}
        placing: Use = {}
        for window in windows:
            reading = self._reading(window)
            total += _step(_together(reading, moving, placing), limited)
            moving, arriving, placing = self._moving(window), self._placing(window), arriving
            read += max(reading.values())
            exchange += max(moving.values(), default=0.0)
        total += _step(_together(moving, placing), limited) + _step(arriving, limited)
        return Seconds(read, exchange, total, _limit(limited))

    def everyone_reads_all(self, size_bytes: int) -> Seconds:
        """Returns the time in which every rank reads the whole checkpoint. Ranks of a node share a page cache."""
        use = self._storage(
            torch.full((self._cluster.nodes(self._ranks),), size_bytes), torch.tensor([size_bytes] * self._ranks)
        )
        seconds = max(use.values())
        return Seconds(seconds, 0.0, seconds, _limit(use))

    def _reading(self, window: Window) -> Use:
        return self._storage(self._by_node(window.read_bytes), window.read_bytes)

    def _storage(self, node_bytes: Tensor, rank_bytes: Tensor) -> Use:
        cluster = self._cluster
        return {
            "storage": int(node_bytes.sum()) / cluster.storage_bytes_per_second,
            "storage of a node": int(node_bytes.max()) / cluster.node_storage_bytes_per_second,
            "PCIe": int(rank_bytes.max()) / cluster.pcie_bytes_per_second,
        }

    def _moving(self, window: Window) -> Use:
        """Returns the use of resources by a collective. Bytes of other nodes arrive from network cards, over PCIe."""
        if window.collective == "none":
            return {}
        cluster = self._cluster
        if window.collective == "gather":
            # A ring through all ranks of all nodes: each byte enters each node once, and is forwarded inside.
            segment_bytes, here = int(window.send_bytes.max()), min(self._ranks, cluster.node_ranks)
            link_bytes = segment_bytes * (self._ranks - 1)
            network_bytes = segment_bytes * (self._ranks - here)
            pcie_bytes = network_bytes // here
        else:
            inside = torch.where(self._same_node, window.sent_bytes, 0)
            outside = window.sent_bytes - inside
            link_bytes = _busiest(inside.sum(1), inside.sum(0))
            network_bytes = _busiest(self._by_node(outside.sum(1)), self._by_node(outside.sum(0)))
            pcie_bytes = _busiest(outside.sum(1), outside.sum(0))
        return {
            "NVLink": link_bytes / cluster.nvlink_bytes_per_second,
            "network": network_bytes / cluster.node_network_bytes_per_second,
            "PCIe": pcie_bytes / cluster.pcie_bytes_per_second,
            "latency": cluster.collective_seconds,
        }

    def _placing(self, window: Window) -> Use:
        return {"memory": int(window.received_bytes.max()) / self._cluster.memory_bytes_per_second}

    def _by_node(self, rank_bytes: Tensor) -> Tensor:
        nodes = torch.zeros(self._cluster.nodes(self._ranks), dtype=torch.int64)
        return nodes.index_add(0, self._node_of, rank_bytes)


def _step(use: Use, limited: Use) -> float:
    """Adds concurrent work, which takes as long as its busiest resource."""
    if not use:
        return 0.0
    limit = _limit(use)
    limited[limit] += use[limit]
    return use[limit]


def _together(*uses: Use) -> Use:
    """Returns the combined use of resources by concurrent work."""
    return {name: sum(use.get(name, 0.0) for use in uses) for name in {name for use in uses for name in use}}


def _limit(use: Use) -> str:
    return max(use, key=lambda name: use[name])


def _busiest(out: Tensor, into: Tensor) -> int:
    return max(int(out.max()), int(into.max()))
