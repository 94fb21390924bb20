"""Operations on stored tensors that need a bounded amount of memory: they load batches of regions."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region

_CPU = torch.device("cpu")

# Upper bound for a batch, in bytes.
BATCH_BYTES = 32 << 20


def copy_into(checkpoint: OpenCheckpoint, names: Sequence[str], out: Sequence[Tensor]) -> None:
    """Overwrites tensors of the stored shapes, and casts as `Tensor.copy_` does where the dtypes differ."""
    pairs = list(zip(names, out, strict=True))
    same = [(name, tensor) for name, tensor in pairs if tensor.dtype == checkpoint.tensors[name].dtype]
    checkpoint.load_into([name for name, _ in same], [tensor for _, tensor in same])
    copies = (
        _RegionCopy(name, region, math.prod(region.lengths) * checkpoint.tensors[name].element_size(), tensor)
        for name, tensor in pairs
        if tensor.dtype != checkpoint.tensors[name].dtype
        for region in _split(checkpoint.tensors[name])
    )
    with torch.no_grad():
        for batch in _batches(copies):
            names, regions = [copy.name for copy in batch], [copy.region for copy in batch]
            loaded = checkpoint.load_boxes(names, regions, batch[0].out.device)
            for copy, tensor in zip(batch, loaded, strict=True):
                copy.region.view(copy.out).copy_(tensor)


def have_equal_bits(checkpoint: OpenCheckpoint, names: Sequence[str], rank: int = 0, size: int = 1) -> bool:
    """Returns whether stored tensors have the same dtype, shape and bits.

    Each of `size` ranks compares its own part of the values; the tensors are equal if the result is True on all ranks.
    """
    first, *others = [checkpoint.tensors[name] for name in names]
    if any((other.dtype, other.shape) != (first.dtype, first.shape) for other in others):
        return False
    for region in islice(_split(first), rank, None, size):
        loaded = checkpoint.load_boxes(names, [region] * len(names), _CPU)
        part, *rest = [tensor.reshape(-1).view(torch.uint8) for tensor in loaded]
        if not all(torch.equal(part, other) for other in rest):
            return False
    return True


class _RegionCopy(NamedTuple):
    """Region of a stored tensor, and the tensor of which it overwrites the same region."""

    name: str
    region: Region
    nbytes: int
    out: Tensor


def _split(tensor: Tensor) -> Iterator[Region]:
    return Region.whole(tensor.shape).split(BATCH_BYTES // tensor.element_size())


def _batches(copies: Iterable[_RegionCopy]) -> Iterator[list[_RegionCopy]]:
    """Groups consecutive copies to one device into batches of at most `BATCH_BYTES`."""
    batch: list[_RegionCopy] = []
    size = 0
    for copy in copies:
        if batch and (size + copy.nbytes > BATCH_BYTES or batch[0].out.device != copy.out.device):
            yield batch
            batch, size = [], 0
        batch.append(copy)
        size += copy.nbytes
    if batch:
        yield batch
