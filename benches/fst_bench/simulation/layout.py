"""Layouts of a model over the ranks of a group."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..planner import Chunk, Shard, ShardRequest, Whole, region_of
from ..workload import TensorSpec
from .model import Model

NODE_RANKS = 8  # of nodes with eight GPUs
# Tensors that tensor parallelism shards by rows and by columns, as Megatron and vLLM do. The rest is replicated.
BY_ROWS = {"embed_tokens", "lm_head", "head"} | {
    f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "q_b", "kv_b")
}
BY_COLUMNS = {"o_proj", "down_proj"}
EXPERTS = "expert-parallel over all ranks, the rest"


class NodePosition(NamedTuple):
    """Position of a rank among the ranks of its node that load together."""

    rank: int
    ranks: int


def positions(ranks: int, node_ranks: int) -> list[NodePosition]:
    """Returns the position of each rank of a group that fills one node after the other."""
    return [NodePosition(rank % node_ranks, min(ranks, node_ranks)) for rank in range(ranks)]


@dataclass(frozen=True)
class Layout:
    """Layout of a model: experts are distributed over ranks; `shard` gives a rank's shard of other tensors."""

    name: str
    title: str
    model: str
    shard: Callable[[TensorSpec, NodePosition], Shard]

    def requests(self, model: Model, positions: Sequence[NodePosition]) -> list[tuple[ShardRequest, ...]]:
        """Returns the requests of the rank at each of these positions. Ranks with equal requests get the same tuple."""
        rests: dict[NodePosition, list[ShardRequest]] = {}
        distinct: dict[tuple[ShardRequest, ...], tuple[ShardRequest, ...]] = {}
        lists = []
        for rank, position in enumerate(positions):
            if position not in rests:
                rests[position] = [ShardRequest(tensor.name, self.shard(tensor, position)) for tensor in model.rest]
            own = (*rests[position], *_own_experts(model, rank, len(positions)))
            lists.append(distinct.setdefault(own, own))
        return lists


def replicated(tensor: TensorSpec, position: NodePosition) -> Shard:
    return Whole()


def tensor_parallel(tensor: TensorSpec, position: NodePosition) -> Shard:
    """Shards over the ranks of a node, and replicates over nodes."""
    module = tensor.name.split(".")[-2]
    if module not in BY_ROWS | BY_COLUMNS:
        return Whole()
    return region_of(Chunk(int(module in BY_COLUMNS)), tensor.shape, position.rank, position.ranks)


LAYOUTS: Sequence[Layout] = (
    Layout("dense-tensor-parallel", "tensor-parallel in each node", "llama-70b", tensor_parallel),
    Layout("dense-fully-sharded", "fully sharded over all ranks", "llama-70b", lambda *_: Chunk(0)),
    Layout("dense-replicated", "replicated", "llama-70b", replicated),
    Layout("experts-tensor-parallel", f"{EXPERTS} tensor-parallel in each node", "deepseek-671b", tensor_parallel),
    Layout("experts-replicated", f"{EXPERTS} replicated", "deepseek-671b", replicated),
)


def _own_experts(model: Model, rank: int, ranks: int) -> Iterator[ShardRequest]:
    """Distributes experts evenly. With more ranks than experts, neighbouring ranks share one."""
    count = len(model.experts)
    first, end = rank * count // ranks, (rank + 1) * count // ranks
    for expert in range(first, max(end, min(first + 1, count))):
        yield from (ShardRequest(tensor.name, Whole()) for tensor in model.experts[expert])
