"""Placements of tensors on the ranks of a group, and the shards that loads must return for them."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard


def shard_of(tensor, placement, group=None):
    """Returns the shard of this rank, for a dimension as `torch.chunk` splits it. It is empty if chunks are too few."""
    if isinstance(placement, Replicate):
        return tensor
    if not isinstance(placement, Shard):
        return tensor[placement]
    chunks = tensor.chunk(dist.get_world_size(group), placement.dim)
    rank = dist.get_rank(group)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(placement.dim, 0, 0)


def rows(name: str, shape: torch.Size) -> Shard | Replicate:
    return Shard(0) if shape else Replicate()


def columns(name: str, shape: torch.Size) -> Shard | Replicate:
    return Shard(-1) if shape else Replicate()
