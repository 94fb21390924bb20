"""Shards of tensors that a rank requests, and their encoding for the planner."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.region import Region


class Replicated(NamedTuple):
    """The whole tensor."""


class Sharded(NamedTuple):
    """This rank's chunk of a tensor that `torch.chunk` splits into as many chunks as the group has ranks.

    Attributes:
        dim: Dimension that is split. A negative dimension counts from the last.
    """

    dim: int


# The steps of a region are 1.
Shard = Replicated | Sharded | Region


class ShardRequest(NamedTuple):
    """Request of a rank for its shard of the tensor `name`."""

    name: str
    shard: Shard


def encode(requests: Sequence[ShardRequest], positions: Mapping[str, int]) -> Tensor:
    """Encodes the requests of a rank for the planner, as int64 on the CPU.

    A request is the position of its tensor in the checkpoint, the kind of shard, and the numbers of the shard.
    """
    numbers: list[int] = []
    for name, shard in requests:
        numbers.append(positions[name])
        match shard:
            case Replicated():
                numbers.append(0)
            case Sharded(dim):
                numbers += 1, dim
            case Region(starts, lengths):
                numbers += 2, *starts, *lengths
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def region_of(shard: Shard, shape: Sequence[int], rank: int, size: int) -> Region:
    """Returns the region of a shard for one of `size` ranks.

    Raises:
        ValueError: The tensor does not have the dimension of the shard.
    """
    match shard:
        case Region():
            return shard
        case Sharded(dim):
            if not -len(shape) <= dim < len(shape):
                raise ValueError(f"dimension {dim} of a tensor with shape {list(shape)}")
            chunk = chunk_of(shape[dim], rank, size)
            return Region.whole(shape).replace(dim % len(shape), (chunk.start, len(chunk), 1))
    return Region.whole(shape)


def chunk_of(length: int, index: int, count: int) -> range:
    """Returns the indices of chunk `index` if `torch.chunk` splits a dimension into `count` chunks.

    `torch.chunk` may return fewer chunks; the missing ones are empty here.
    """
    chunk_length = -(-length // count)
    return range(min(index * chunk_length, length), min((index + 1) * chunk_length, length))
