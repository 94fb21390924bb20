"""Indices of tensors as regions to read.

Frameworks accept different indices, so each has a planning function.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.region import Region
from fst._core.errors import SafetensorError
from fst._core.index_range import IndexRange

# Largest number of elements from the first to the last position of a list that are read as a whole.
_HULL_ELEMENTS = 4096

# Names of the dtypes of tensors and arrays whose elements are positions.
_POSITION_DTYPES = ("int64", "int32")


class IndexedRead(NamedTuple):
    """Read that gives the result of an index.

    Attributes:
        regions: Regions to load. They differ in the dimension `dim` only, along which they are concatenated.
        dim: Dimension of the concatenation.
        final_index: Index that turns the concatenated regions into the result, or None if they are the result.
    """

    regions: list[Region]
    dim: int
    final_index: tuple[Any, ...] | None


def plan_torch_index(index: Any, shape: Sequence[int]) -> IndexedRead | None:
    """Plans the read for `tensor[index]` with PyTorch's rules.

    Returns:
        The read, or None for indices that only PyTorch interprets, such as masks, and for invalid ones.
    """
    items = index if isinstance(index, tuple) else (index,)
    if items and all(type(item) is slice for item in items) and len(items) <= len(shape):
        return _plan_slices(items, shape)
    if type(index) is list and shape and (rows := _plan_rows(index, shape)) is not None:
        return rows
    # A bool adds a dimension, and a mask covers several. uint8 is a mask, too, and PyTorch refuses most other dtypes.
    if any(isinstance(item, bool) or not _holds_positions(item) for item in items):
        return None
    expanded = _expand(items, len(shape))
    if expanded is None or not shape:
        return None
    ranges: list[IndexRange] = []
    final: list[Any] = []
    lists: list[tuple[int, int, list[int]]] = []
    for item in expanded:
        if item is None:
            final.append(None)
            continue
        dim, size = len(ranges), shape[len(ranges)]
        if isinstance(item, slice):
            index_range = _slice_range(item, size)
            final.append(slice(None))
        # Python converts an array of one element to an int, but PyTorch treats it as a list.
        elif getattr(item, "ndim", 0) == 0 and (position := _position(item, size)) is not None:
            index_range = position, 1, 1
            final.append(0)
        elif (positions := _positions(item, size)) is not None:
            lists.append((dim, len(final), positions))
            # With several lists or few elements, the range from the first to the last position of each is read.
            first = min(positions, default=0)
            index_range = first, max(positions, default=-1) + 1 - first, 1
            final.append([position - first for position in positions])
        else:
            return None
        if index_range is None:
            return None
        ranges.append(index_range)
    region = Region(ranges)
    if len(lists) != 1 or math.prod(region.lengths) <= _HULL_ELEMENTS:
        return IndexedRead([region], 0, tuple(final))
    [(dim, list_position, positions)] = lists
    read = sorted(set(positions))
    order = {position: index for index, position in enumerate(read)}
    final[list_position] = slice(None) if positions == read else [order[position] for position in positions]
    return IndexedRead([region.replace(dim, run) for run in _runs(read)], dim, tuple(final))


def plan_numpy_index(index: Any, shape: Sequence[int]) -> IndexedRead:
    """Plans the read for ints, slices and an ellipsis. A bool counts as an int, and an empty list as an empty slice."""
    if isinstance(index, list) and not index:
        index = slice(0, 0)
    if isinstance(index, list):
        raise SafetensorError("Non empty lists are not implemented")
    items = index if isinstance(index, tuple) else (index,)
    if sum(item is Ellipsis for item in items) > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    expanded = None if any(item is None for item in items) else _expand(items, len(shape))
    if expanded is None:
        raise SafetensorError(
            f"the index {index!r} has more dimensions than the tensor, whose shape is {list(shape)}, or new ones (None)"
        )
    ranges: list[IndexRange] = []
    final: list[Any] = []
    for dim, (item, size) in enumerate(zip(expanded, shape, strict=True)):
        if isinstance(item, slice):
            index_range = _slice_range(item, size)
            final.append(slice(None))
        else:
            position = _position(item, size)
            index_range = None if position is None else (position, 1, 1)
            final.append(0)
        if index_range is None and isinstance(item, slice):
            raise SafetensorError(f"Slice step must be a positive integer, got {item.step}")
        if index_range is None and isinstance(item, int) and item < 0:
            raise SafetensorError(f"Invalid index {item} for dimension {dim} of size {size}")
        if index_range is None and isinstance(item, int):
            given = ", ".join(map(_text, expanded if any(item is Ellipsis for item in items) else items))
            raise SafetensorError(
                f"Error during slicing [{given}] with shape {list(shape)}: index {item} out of bounds for tensor "
                f"dimension #{dim} of size {size}"
            )
        if index_range is None:
            raise SafetensorError(
                f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis, got {item!r}"
            )
        ranges.append(index_range)
    return IndexedRead([Region(ranges)], 0, tuple(final))


def _plan_slices(slices: Sequence[slice], shape: Sequence[int]) -> IndexedRead | None:
    ranges = []
    for item, size in zip(slices, shape, strict=False):
        index_range = _slice_range(item, size)
        if index_range is None:
            return None
        ranges.append(index_range)
    ranges += [(0, size, 1) for size in shape[len(slices) :]]
    return IndexedRead([Region(ranges)], 0, None)


def _plan_rows(rows: list[Any], shape: Sequence[int]) -> IndexedRead | None:
    """Plans the read for a list of positions in the first dimension, or returns None if they are far apart."""
    size, *inner = shape
    if not rows or not all(type(row) is int and -size <= row < size for row in rows):
        return None
    positions = [row % size for row in rows]
    first = min(positions)
    length = max(positions) + 1 - first
    if length * math.prod(inner) > _HULL_ELEMENTS:
        return None
    region = Region([(first, length, 1), *((0, other, 1) for other in inner)])
    return IndexedRead([region], 0, ([position - first for position in positions],))


def _text(item: Any) -> str:
    """Returns an item of an index as the messages of safetensors contain it."""
    if not isinstance(item, slice):
        return str(item)
    start, stop = ("" if bound is None else bound for bound in (item.start, item.stop))
    return f"{start}:{stop}" if item.step in (None, 1) else f"{start}:{stop}:{item.step}"


def placeholder(shape: Sequence[int]) -> Tensor:
    """Returns a tensor of this shape that takes no memory, on which PyTorch checks an index."""
    return torch.empty((), dtype=torch.uint8, device="cpu").expand(tuple(shape))


def _expand(items: Sequence[Any], rank: int) -> list[Any] | None:
    """Replaces the ellipsis, if any, by whole dimensions, and appends missing ones.

    Returns:
        One item for each dimension, and None for each new one; or None for too many items or ellipses.
    """
    ellipses = [index for index, item in enumerate(items) if item is Ellipsis]
    missing = rank - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0 or len(ellipses) > 1:
        return None
    split = ellipses[0] if ellipses else len(items)
    return [*items[:split], *[slice(None)] * missing, *items[split + 1 :]]


def _slice_range(item: slice, size: int) -> IndexRange | None:
    """Returns the indices of a slice, or None for a negative step."""
    if item.step is not None and operator.index(item.step) < 1:
        return None
    start, stop, step = item.indices(size)
    # Python's steps are unbounded, but the operators' are 64-bit integers.
    return start, len(range(start, stop, step)), min(step, max(size, 1))


def _holds_positions(item: Any) -> bool:
    """Returns whether PyTorch takes the elements of a tensor or an array for positions. True for other objects."""
    dtype = getattr(item, "dtype", None)
    return dtype is None or str(dtype).removeprefix("torch.") in _POSITION_DTYPES


def _position(item: Any, size: int) -> int | None:
    """Returns an int counted from the start of its dimension, or None for another type or an int out of range."""
    try:
        position = operator.index(item)
    except TypeError:
        return None
    return position % size if -size <= position < size else None


def _positions(item: Any, size: int) -> list[int] | None:
    """Returns ints counted from the start of their dimension, or None for other types or an int out of range."""
    if getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"):
        item = item.tolist()
    if not isinstance(item, (list, range)) or not all(type(value) is int for value in item):
        return None
    positions = [_position(value, size) for value in item]
    return None if None in positions else [position for position in positions if position is not None]


def _runs(positions: list[int]) -> list[IndexRange]:
    """Groups ascending positions into runs of consecutive ones; without positions, returns an empty run."""
    runs: list[IndexRange] = []
    for position in positions:
        if runs and runs[-1][0] + runs[-1][1] == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1, 1
        else:
            runs.append((position, 1, 1))
    return runs or [(0, 0, 1)]
