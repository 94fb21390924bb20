"""Plans of loads by any number of ranks, without processes for the ranks.

fst's own planner, `torch.classes.fst.LoadPlan`, runs in one process and reads headers only.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fst  # noqa: F401  (registers the classes)

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


class LoadPlan:
    """Plan of a load by ranks.

    Args:
        plan: An instance of `torch.classes.fst.LoadPlan`.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def call(self, method: str, *arguments: int) -> Any:
        """Returns the result of a method of the plan for some ranks and windows."""
        request = arguments[0] if len(arguments) == 1 else arguments
        return json.loads(self._plan.call(method, json.dumps(request)))


class Planner:
    """Plans loads of one checkpoint."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._checkpoint = torch.classes.fst.Checkpoint([str(path) for path in paths], None)
        self._positions = {name: position for position, name in enumerate(self._checkpoint.names())}

    def plan(self, requests: Sequence[Sequence[ShardRequest]], strategy: str, window_bytes: int) -> LoadPlan:
        """Plans a load by one rank for each item of `requests`. Ranks with equal requests may share one list object."""
        distinct = {id(own): own for own in requests}
        indices = {identity: index for index, identity in enumerate(distinct)}
        lists = [self._encode(own) for own in distinct.values()]
        request = {
            "lengths": list(map(len, lists)),
            "list_of_rank": [indices[id(own)] for own in requests],
            "caches": [_NO_PAGE_CACHE] * len(requests),
            "strategy": strategy,
            "window_bytes": window_bytes,
        }
        return LoadPlan(torch.classes.fst.LoadPlan(self._checkpoint, torch.cat(lists), json.dumps(request)))

    def _encode(self, requests: Sequence[ShardRequest]) -> Tensor:
        """Encodes requests as the planner takes them: the number of layouts, the layouts, and for each request the
        position of its tensor and the index of its layout.
        """
        index_of: dict[Shard, int] = {}
        numbers: list[int] = []
        for name, shard in requests:
            numbers += self._positions[name], index_of.setdefault(shard, len(index_of))
        layouts = [number for shard in index_of for number in _layout(shard)]
        return torch.tensor([len(index_of), *layouts, *numbers], dtype=torch.int64, device="cpu")


def _layout(shard: Shard) -> tuple[int, ...]:
    match shard:
        case Whole():
            return (2,)
        case Chunk(dim):
            return 3, dim
        case Region(starts, lengths):
            # One region of some rank.
            return 1, 1, len(starts), 0, *starts, *lengths
