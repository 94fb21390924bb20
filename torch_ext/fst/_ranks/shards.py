"""Shards of tensors that a rank requests, and their encoding for the planner."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.region import Region
from fst._ranks.layout import CHUNK, REPLICATED, WHOLE, MeshLayout, encode_box


class Replicated(NamedTuple):
    """The whole tensor."""


class Sharded(NamedTuple):
    """This rank's chunk of a tensor that `torch.chunk` splits into as many chunks as the group has ranks.

    Attributes:
        dim: Dimension that is split. A negative dimension counts from the last.
    """

    dim: int


# A mesh layout is this rank's local tensor, which is one region. The steps of a region are 1.
Shard = Replicated | Sharded | MeshLayout | Region


class ShardRequest(NamedTuple):
    """Request of a rank for its shard of the tensor `name`."""

    name: str
    shard: Shard


def encode(requests: Sequence[ShardRequest], positions: Mapping[str, int]) -> Tensor:
    """Encodes the requests of a rank for the planner, as int64 on the CPU.

    The number of layouts and the layouts come first. A request is the position of its tensor in the checkpoint, and the
    index of its layout.
    """
    index_of: dict[Shard, int] = {}
    numbers: list[int] = []
    for name, shard in requests:
        numbers += positions[name], index_of.setdefault(shard, len(index_of))
    layouts = [number for shard in index_of for number in _encode_layout(shard)]
    return torch.tensor([len(index_of), *layouts, *numbers], dtype=torch.int64, device="cpu")


def _encode_layout(shard: Shard) -> tuple[int, ...]:
    match shard:
        case MeshLayout():
            return shard.encode()
        case Replicated():
            return (WHOLE,)
        case Sharded(dim):
            return CHUNK, dim
        case Region(starts, lengths):
            # The planner knows the rank.
            return encode_box(0, starts, lengths)


def symbols_of(
    requests: Sequence[ShardRequest], shapes: Mapping[str, torch.Size], rank: int, size: int
) -> Sequence[ShardRequest]:
    """Returns the requests of one of `size` ranks with the `symbol_of` each index region."""
    if size == 1:
        return requests
    return [
        ShardRequest(name, symbol_of(shard, shapes[name], rank, size)) if isinstance(shard, Region) else request
        for request in requests
        for name, shard in [request]
    ]


@lru_cache(maxsize=4096)
def symbol_of(region: Region, shape: tuple[int, ...], rank: int, size: int) -> Shard:
    """Returns a layout over a mesh of all ranks in which a rank holds this region, or the region if none is found.

    Ranks with equal chunks of a tensor have different regions, and one layout: the plan needs it once for all ranks.
    """
    if 0 in region.lengths:
        return region
    counts = [(dim, -(-full // part)) for dim, (full, part) in enumerate(zip(shape, region.lengths, strict=True))]
    splits: list[tuple[int | None, int]] = [(dim, count) for dim, count in counts if count > 1]
    copies, rest = divmod(size, math.prod(count for _, count in splits))
    if copies == 0 or rest > 0:
        return region
    if copies > 1:
        splits.append((None, copies))
    for mesh in permutations(splits):
        layout = _layout_over_all(mesh, rank, size)
        if layout.local(shape).regions == [(region, Region.whole(region.lengths))]:
            return layout
    return region


@lru_cache(maxsize=1024)
def _layout_over_all(mesh: tuple[tuple[int | None, int], ...], rank: int, size: int) -> MeshLayout:
    """Returns a layout over a mesh of all ranks: the dimension that each mesh dimension shards, and its size."""
    coordinate: list[int] = []
    for _, count in reversed(mesh):
        rank, place = divmod(rank, count)
        coordinate.insert(0, place)
    placements = [REPLICATED if dim is None else (dim, 1) for dim, _ in mesh]
    return MeshLayout([count for _, count in mesh], range(size), placements, coordinate)


@lru_cache(maxsize=1024)
def local_shards(layout: MeshLayout, shape: tuple[int, ...]) -> list[tuple[Shard, Region]]:
    """Returns the shards that make up this rank's local tensor, each with its region of the local tensor.

    A local tensor of one region has a shard that is equal on all ranks, which makes the agreement on a plan cheap.
    """
    if layout.is_replicated:
        return [(Replicated(), Region.whole(shape))]
    local = layout.local(shape)
    if layout.is_known and len(local.regions) < 2:
        return [(layout, Region.whole(local.shape))]
    return list(local.regions) or [(local.region, local.region)]


def region_of(shard: Shard, shape: Sequence[int], rank: int, size: int) -> Region:
    """Returns the region of a shard for one of `size` ranks."""
    match shard:
        case Region():
            return shard
        case Sharded(dim):
            if not -len(shape) <= dim < len(shape):
                raise ValueError(f"dimension {dim} of a tensor with shape {list(shape)}")
            return _layout_over_all(((dim % len(shape), size),), rank, size).local(shape).region
        case MeshLayout():
            return shard.local(shape).region
    return Region.whole(shape)
