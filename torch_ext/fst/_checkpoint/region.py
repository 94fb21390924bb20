"""Index regions: parts of tensors, given by indices."""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter

from torch import Tensor

from fst._core.index_range import IndexRange


class Region(tuple[IndexRange, ...]):
    """Index region of a tensor: `(start, length, step)` for each dimension.

    It selects `length` indices of a dimension, from `start` on, and the distance between consecutive ones is `step`.
    """

    __slots__ = ()
    __match_args__ = ("starts", "lengths", "steps")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """Returns the region that covers a tensor of this shape."""
        return cls((0, length, 1) for length in shape)

    @classmethod
    def unit_step(cls, starts: Sequence[int], lengths: Sequence[int]) -> "Region":
        """Returns the region of consecutive indices in every dimension."""
        return cls(zip(starts, lengths, (1,) * len(lengths), strict=True))

    @property
    def starts(self) -> tuple[int, ...]:
        """First index of each dimension."""
        return tuple(map(itemgetter(0), self))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of indices of each dimension, which is the shape of the region."""
        return tuple(map(itemgetter(1), self))

    @property
    def steps(self) -> tuple[int, ...]:
        """Distance between consecutive indices of each dimension."""
        return tuple(map(itemgetter(2), self))

    def replace(self, dim: int, index_range: IndexRange) -> "Region":
        """Returns a copy with other indices in one dimension."""
        return Region((*self[:dim], index_range, *self[dim + 1 :]))

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the region of `tensor` as a view."""
        return tensor[tuple(slice(start, start + length * step, step) for start, length, step in self)]

    def split(self, elements_max: int) -> Iterator["Region"]:
        """Splits the region along its outer dimensions into regions of at most `elements_max` elements, at least one.

        All steps must be 1.
        """
        if math.prod(self.lengths) <= max(elements_max, 1):
            yield self
            return
        dim = next(dim for dim, length in enumerate(self.lengths) if length > 1)
        start, length, _ = self[dim]
        half = length // 2
        yield from self.replace(dim, (start, half, 1)).split(elements_max)
        yield from self.replace(dim, (start + half, length - half, 1)).split(elements_max)
