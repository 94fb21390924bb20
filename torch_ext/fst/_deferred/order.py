"""Order of writes to one storage, so that writes without an order between them can run in one load."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from fst._checkpoint.region import Region
from fst._deferred.region import regions_of
from fst._deferred.view import stride_order


class Ordered(NamedTuple):
    """Writes of one storage, by their positions.

    Attributes:
        steps: Positions of writes that share no element. The writes of a step need those of the steps before it.
        nbytes: Number of bytes that the writes of the first step change, if there is only one step, or else 0.
    """

    steps: list[list[int]]
    nbytes: int


class _Relation(Enum):
    DISJOINT = 0
    COVERED = 1
    OVERLAPPING = 2


class Layout:
    """Elements of a storage by their indices in the tensor that has all of it.

    Args:
        tensors: Tensors in the storage.
        nbytes: The size of the storage.
    """

    def __init__(self, tensors: Sequence[Tensor], nbytes: int) -> None:
        self._shape: tuple[int, ...] | None = None
        self._itemsize = 0
        for tensor in tensors:
            whole = tensor.permute(stride_order(tensor))
            if tensor.nbytes == nbytes and whole.is_contiguous():
                self._shape, self._itemsize = tuple(whole.shape), tensor.element_size()
                return

    def order(self, targets: Sequence[Tensor]) -> Ordered:
        """Returns an order of writes that leaves the same values as one after the other.

        Writes whose elements are all written again by a later one are left out.
        """
        extents = [extent(target) for target in targets]
        regions = self._regions(targets)
        needs: list[list[int]] = [[] for _ in targets]
        dropped: set[int] = set()
        active: list[int] = []
        for current in sorted(range(len(targets)), key=lambda index: extents[index]):
            active = [index for index in active if extents[index][1] > extents[current][0]]
            for other in active:
                earlier, later = sorted((current, other))
                relation = _relation(regions[earlier], regions[later])
                if relation is _Relation.COVERED:
                    dropped.add(earlier)
                elif relation is _Relation.OVERLAPPING:
                    needs[later].append(earlier)
            active.append(current)
        levels: dict[int, int] = {}
        steps: list[list[int]] = []
        for index, before in enumerate(needs):
            if index in dropped:
                continue
            level = levels[index] = max((levels[other] + 1 for other in before if other in levels), default=0)
            steps += [[] for _ in range(level + 1 - len(steps))]
            steps[level].append(index)
        nbytes = sum(targets[index].nbytes for index in steps[0]) if len(steps) == 1 else 0
        return Ordered(steps, nbytes)

    def _regions(self, targets: Sequence[Tensor]) -> list[Region | None]:
        """Returns the region of each target in the tensor that has all of the storage, or None if it is none."""
        found: list[Region | None] = [None] * len(targets)
        if self._shape is not None:
            known = [
                index
                for index, target in enumerate(targets)
                if target.element_size() == self._itemsize and target.numel()
            ]
            sorted_targets = [targets[index].permute(stride_order(targets[index])) for index in known]
            for index, region in zip(known, regions_of(sorted_targets, self._shape), strict=True):
                found[index] = region
        return found


def extent(target: Tensor) -> tuple[int, int]:
    """Returns the first byte of a view, and the byte behind its last one."""
    spans = ((length - 1) * stride for length, stride in zip(target.shape, target.stride(), strict=True))
    size, begin = target.element_size(), target.storage_offset()
    return int(begin * size), int((begin + sum(spans) + 1) * size if target.numel() else begin * size)


def _relation(earlier: Region | None, later: Region | None) -> _Relation:
    if earlier is None or later is None:
        return _Relation.OVERLAPPING
    is_covered = True
    for (start, length, step), (other_start, other_length, other_step) in zip(earlier, later, strict=True):
        last, other_last = start + (length - 1) * step, other_start + (other_length - 1) * other_step
        if last < other_start or other_last < start:
            return _Relation.DISJOINT
        is_covered &= other_step == 1 and other_start <= start and last <= other_last
    return _Relation.COVERED if is_covered else _Relation.OVERLAPPING
