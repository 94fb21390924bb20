"""What ranks, nodes and the links between them can do."""

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank stands among the ranks of its node."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class Cluster:
    """Nodes of some ranks each, and the rates of what these share. Links carry their rate in each direction at once.

    The defaults are those of nodes with eight H200s, a network card of 400 Gb/s for each of them and one more for a
    parallel file system: what such links reach in practice, not what is printed on them.

    Attributes:
        node_ranks: The ranks of a node, each with a GPU.
        storage_bytes_per_second: What the file system gives to all nodes together.
        node_storage_bytes_per_second: What it gives to one node.
        pcie_bytes_per_second: From the host, or its network card, to one GPU.
        nvlink_bytes_per_second: Between one GPU and the others of its node.
        node_network_bytes_per_second: Between one node and the others.
        memory_bytes_per_second: A copy inside a GPU.
        collective_seconds: What a collective takes beyond its bytes.
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
        """How many nodes so many ranks stand on."""
        return -(-ranks // self.node_ranks)

    def places(self, ranks: int) -> list[Place]:
        """Where the ranks of a group stand, which fill one node after the other."""
        return [Place(rank % self.node_ranks, min(ranks, self.node_ranks)) for rank in range(ranks)]
