"""Indices along one dimension, and regions as the flat lists that operators take."""

from collections.abc import Iterable, Sequence

# Start, length and step of the indices along one dimension.
IndexRange = tuple[int, int, int]
# Starts, lengths and steps of regions: one number for each dimension of each region.
FlatRegions = tuple[list[int], list[int], list[int]]


def flatten(regions: Iterable[Sequence[IndexRange]]) -> FlatRegions:
    """Returns the starts, the lengths and the steps of all regions."""
    try:
        ranges = [index_range for region in regions for index_range in region]
        starts, lengths, steps = ([index_range[part] for index_range in ranges] for part in range(3))
    except (TypeError, IndexError):
        raise TypeError(
            "boxes must hold (start, length, step) for each dimension of each tensor, such as [[(0, 2, 1), (0, 4, 1)]]"
        ) from None
    return starts, lengths, steps
