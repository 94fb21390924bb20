"""Cluster: ranks, nodes, and rates of the links between them."""

from dataclasses import dataclass
from typing import NamedTuple


class NodePosition(NamedTuple):
    """Position of a rank among the ranks of its node that load together."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class Cluster:
    """Nodes of `node_ranks` ranks each, and the rates of shared resources. Links are full duplex.

    The defaults describe nodes with eight H200s, one 400 Gb/s network card for each GPU and one for a parallel file
    system. The rates are those that such links reach in practice, not nominal ones.

    Attributes:
        node_ranks: Number of ranks of a node, each with one GPU.
        storage_bytes_per_second: From the file system to all nodes together.
        node_storage_bytes_per_second: From the file system to one node.
        pcie_bytes_per_second: From the host or a network card to one GPU.
        nvlink_bytes_per_second: Between one GPU and the others of its node.
        node_network_bytes_per_second: Between one node and the others.
        memory_bytes_per_second: A copy inside a GPU.
        collective_seconds: Fixed time of a collective.
    """

    node_ranks: int = 8
    storage_bytes_per_second: float = 400e9
    node_storage_bytes_per_second: float = 45e9
    pcie_bytes_per_second: float = 55e9
    nvlink_bytes_per_second: float = 360e9
    node_network_bytes_per_second: float = 360e9
    memory_bytes_per_second: float = 2e12
    collective_seconds: float = 100e-6

    def nodes(self, ranks: int) -> int:
        """Returns the number of nodes of a group."""
        return -(-ranks // self.node_ranks)

    def positions(self, ranks: int) -> list[NodePosition]:
        """Returns the position of each rank of a group that fills one node after the other."""
        return [NodePosition(rank % self.node_ranks, min(ranks, self.node_ranks)) for rank in range(ranks)]
