"""Views of contiguous tensors as index regions."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from fst._checkpoint.region import Region
from fst._core import ops


def regions_of(views: Iterable[Tensor], shape: Sequence[int]) -> list[Region | None]:
    """Returns the region of a contiguous tensor that each of some views covers.

    Args:
        views: Views that have elements, and whose strides do not increase from dim to dim. Their storage offsets and
            strides count the elements of the contiguous tensor.
        shape: The shape of the contiguous tensor.

    Returns:
        For each view the region, with its elements in the order of the view's, or None if the view is no region.
    """
    layouts = [[view.storage_offset(), view.shape, view.stride()] for view in views]
    if not layouts:
        return []
    found = ops.call("regions", [shape, layouts])
    return [None if region is None else Region(map(tuple, region)) for region in found]


def region_of(view: Tensor, shape: Sequence[int]) -> Region | None:
    """Returns the region of a contiguous tensor that a view covers, or None, as `regions_of`."""
    return regions_of([view], shape)[0]
