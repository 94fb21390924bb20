"""Comparison of stored tensors in a bounded amount of memory."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region

# Upper bound for the part of a tensor that is compared at a time, in bytes.
BATCH_BYTES = 32 << 20


def have_equal_bits(checkpoint: OpenCheckpoint, names: Sequence[str], rank: int = 0, size: int = 1) -> bool:
    """Returns whether stored tensors have the same dtype, shape and bits.

    Each of `size` ranks compares its own part of the values; the tensors are equal if the result is True on all ranks.
    """
    first, *others = [checkpoint.tensors[name] for name in names]
    if any((other.dtype, other.shape) != (first.dtype, first.shape) for other in others):
        return False
    for _, parts in load_parts([(checkpoint, name) for name in names], rank, size):
        part, *rest = [part.view(torch.uint8) for part in parts]
        if not all(torch.equal(part, other) for other in rest):
            return False
    return True


def load_parts(
    stored: Sequence[tuple[OpenCheckpoint, str]], rank: int = 0, size: int = 1
) -> Iterator[tuple[Region, list[Tensor]]]:
    """Yields the same index region of several stored tensors, until all elements were yielded.

    Args:
        stored: The checkpoints and names of tensors of one dtype and shape.
        rank, size: Which of the regions are yielded: every `size`-th, from the one at index `rank` on.

    Yields:
        The region, and its elements of each tensor as contiguous 1-d tensors, which the next turn overwrites.
    """
    checkpoint, name = stored[0]
    meta = checkpoint.tensors[name]
    elements = min(meta.numel(), max(1, BATCH_BYTES // meta.element_size()))
    # Not views of a mapped file: if the file became shorter, the comparison would end the process.
    buffers = [torch.empty(elements, dtype=meta.dtype, device="cpu") for _ in stored]
    for region in islice(Region.whole(meta.shape).split(elements), rank, None, size):
        parts = [buffer[: math.prod(region.lengths)] for buffer in buffers]
        for (checkpoint, name), part in zip(stored, parts, strict=True):
            checkpoint.load_boxes_into([name], [region], [part.view(region.lengths)])
        yield region, parts
