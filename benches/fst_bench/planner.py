"""Plans of loads by any number of ranks, without processes for the ranks.

fst's own planner, `torch.classes.fst.GroupPlan`, runs in one process and reads headers only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fst._checkpoint import region
from fst._core.classes import Checkpoint, GroupPlan
from fst._distributed import shards

# GPUs are filled past the page cache, so no ranks share one.
_NO_PAGE_CACHE = -1


class Whole(NamedTuple):
    """All of a tensor, as every rank of a replicated tensor keeps it."""


class Chunk(NamedTuple):
    """This rank's chunk of a tensor, as `torch.chunk` cuts dimension `dim` into one chunk for each rank."""

    dim: int


class Region(NamedTuple):
    """Part of a tensor: for each dimension the first index and the number of indices."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


Shard = Whole | Chunk | Region


class ShardRequest(NamedTuple):
    """Request for a shard of the tensor with this name."""

    name: str
    shard: Shard


def region_of(shard: Shard, shape: Sequence[int], rank: int, ranks: int) -> Region:
    """Returns the region that a shard is for one rank of a group.

    Computed here rather than by fst, so that results of the planner can be checked against it.
    """
    starts, lengths = [0] * len(shape), list(shape)
    match shard:
        case Region():
            return shard
        case Chunk(dim):
            step = -(-shape[dim] // ranks)
            starts[dim] = min(rank * step, shape[dim])
            lengths[dim] = min(step, shape[dim] - starts[dim])
    return Region(tuple(starts), tuple(lengths))


class Planner:
    """Plans loads of one checkpoint."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._checkpoint = Checkpoint([str(path) for path in paths])
        self._positions = {name: position for position, name in enumerate(self._checkpoint.names())}

    def plan(self, requests: Sequence[Sequence[ShardRequest]], strategy: str, window_bytes: int) -> GroupPlan:
        """Plans a load by one rank for each item of `requests`. Ranks with equal requests may share one list object."""
        distinct = {id(own): own for own in requests}
        indices = {identity: index for index, identity in enumerate(distinct)}
        return GroupPlan(
            self._checkpoint,
            [self._encode(own) for own in distinct.values()],
            [indices[id(own)] for own in requests],
            [_NO_PAGE_CACHE] * len(requests),
            strategy,
            window_bytes,
        )

    def _encode(self, requests: Sequence[ShardRequest]) -> Tensor:
        """Encodes requests as `GroupPlan` takes them."""
        return shards.encode([shards.ShardRequest(name, _shard(shard)) for name, shard in requests], self._positions)


def _shard(shard: Shard) -> shards.Shard:
    match shard:
        case Whole():
            return shards.Replicated()
        case Chunk(dim):
            return shards.Sharded(dim)
        case Region(starts, lengths):
            return region.Region.unit_step(starts, lengths)
