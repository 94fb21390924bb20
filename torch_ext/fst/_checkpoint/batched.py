"""Comparison of stored tensors in a bounded amount of memory."""

import math
from collections.abc import Sequence
from itertools import islice

import torch

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
    elements = min(first.numel(), max(1, BATCH_BYTES // first.element_size()))
    # Not views of a mapped file: if the file became shorter, the comparison would end the process.
    buffers = [torch.empty(elements, dtype=first.dtype, device="cpu") for _ in names]
    for region in islice(Region.whole(first.shape).split(elements), rank, None, size):
        parts = [buffer[: math.prod(region.lengths)] for buffer in buffers]
        checkpoint.load_boxes_into(names, [region] * len(names), [part.view(region.lengths) for part in parts])
        part, *rest = [part.view(torch.uint8) for part in parts]
        if not all(torch.equal(part, other) for other in rest):
            return False
    return True
