"""What a rank wants of a checkpoint, and how the planner is told."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.region import Region


class Whole(NamedTuple):
    """All of a tensor, as every rank has it that is replicated."""


class Chunk(NamedTuple):
    """This rank's chunk of a tensor, as `torch.chunk` cuts it into as many as the group has ranks.

    Attributes:
        dim: The dimension that is cut; a negative one counts from the last.
    """

    dim: int


# A region has a step of 1 in every dimension.
Share = Whole | Chunk | Region


class Want(NamedTuple):
    """A share of the tensor with this name."""

    name: str
    share: Share


def encode(wants: Sequence[Want], positions: Mapping[str, int]) -> Tensor:
    """The numbers that tell the planner what a rank wants: for each want the position of its tensor in the checkpoint,
    which kind of share it is, and the numbers of the share.
    """
    numbers: list[int] = []
    for name, share in wants:
        numbers.append(positions[name])
        match share:
            case Whole():
                numbers.append(0)
            case Chunk(dim):
                numbers += 1, dim
            case Region(starts, lengths):
                numbers += 2, *starts, *lengths
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def part_of(share: Share, shape: Sequence[int], rank: int, size: int) -> Region:
    """The box that a share is for one of `size` ranks.

    Raises:
        ValueError: The tensor has no such dimension.
    """
    starts, lengths = [0] * len(shape), list(shape)
    match share:
        case Region():
            return share
        case Chunk(dim):
            if not -len(shape) <= dim < len(shape):
                raise ValueError(f"dimension {dim} of a tensor with shape {list(shape)}")
            step = -(-shape[dim] // size)
            starts[dim] = min(rank * step, shape[dim])
            lengths[dim] = min(step, shape[dim] - starts[dim])
    return Region.unit_step(starts, lengths)
