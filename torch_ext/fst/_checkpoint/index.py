"""What stands between the brackets of a slice, turned into boxes to read.

A box is a start, a length and a step for each dimension. Frameworks differ in what they take for an index, so there is
a function for each.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.errors import SafetensorError

Span = tuple[int, int, int]


class Access(NamedTuple):
    """Boxes to read, and what makes the result of them."""

    # They differ in the dimension `dim` alone, along which they are put together.
    boxes: list[list[Span]]
    dim: int
    # Of what is then there, this is the result.
    last: tuple[Any, ...]


def as_pytorch(index: Any, shape: Sequence[int]) -> Access | None:
    """What `tensor[index]` of PyTorch takes of a tensor; None where PyTorch alone can tell what that is, or whether."""
    items = index if isinstance(index, tuple) else (index,)
    # A bool makes a dimension, and a mask takes several.
    if any(isinstance(item, bool) or getattr(item, "dtype", None) in (torch.bool, bool) for item in items):
        return None
    expanded = _expanded(items, len(shape))
    if expanded is None or not shape:
        return None
    box: list[Span] = []
    last: list[Any] = []
    lists: list[tuple[int, int, list[int]]] = []
    for item in expanded:
        if item is None:
            last.append(None)
            continue
        dim, size = len(box), shape[len(box)]
        if isinstance(item, slice):
            span = _span(item, size)
            last.append(slice(None))
        # An array with one element is an int to Python, but a list to PyTorch.
        elif getattr(item, "ndim", 0) == 0 and (position := _position(item, size)) is not None:
            span = position, 1, 1
            last.append(0)
        elif (positions := _positions(item, size)) is not None:
            lists.append((dim, len(last), positions))
            # Where there are several lists, all from the first to the last of each are read.
            first = min(positions, default=0)
            span = first, max(positions, default=-1) + 1 - first, 1
            last.append([position - first for position in positions])
        else:
            return None
        if span is None:
            return None
        box.append(span)
    if len(lists) != 1:
        return Access([box], 0, tuple(last))
    [(dim, place, positions)] = lists
    read = sorted(set(positions))
    order = {position: index for index, position in enumerate(read)}
    last[place] = slice(None) if positions == read else [order[position] for position in positions]
    return Access([[*box[:dim], run, *box[dim + 1 :]] for run in _runs(read)], dim, tuple(last))


def as_numpy(index: Any, shape: Sequence[int]) -> Access:
    """What ints, slices and an ellipsis take of a tensor. A bool is an int, and an empty list an empty slice.

    Raises SafetensorError for any other index, and for one that does not fit the shape.
    """
    if isinstance(index, list) and not index:
        index = slice(0, 0)
    items = index if isinstance(index, tuple) else (index,)
    expanded = None if any(item is None for item in items) else _expanded(items, len(shape))
    if expanded is None:
        raise SafetensorError(
            f"the index {index!r} has more dimensions than the tensor, whose shape is {list(shape)}, new ones (None), "
            "or several ellipses (...)"
        )
    box: list[Span] = []
    last: list[Any] = []
    for item, size in zip(expanded, shape, strict=True):
        if isinstance(item, slice):
            span = _span(item, size)
            last.append(slice(None))
        else:
            position = _position(item, size)
            span = None if position is None else (position, 1, 1)
            last.append(0)
        if span is None:
            raise SafetensorError(
                f"the index {index!r} has {item!r} for a dimension of size {size}; expected an int inside it, a slice "
                "whose step is 1 or more, or an ellipsis (...)"
            )
        box.append(span)
    return Access([box], 0, tuple(last))


def _expanded(items: Sequence[Any], rank: int) -> list[Any] | None:
    """The items, with whole dimensions where an ellipsis or nothing stands for them; None where they are too many."""
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    missing = rank - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0 or len(ellipses) > 1:
        return None
    place = ellipses[0] if ellipses else len(items)
    return [*items[:place], *[slice(None)] * missing, *items[place + 1 :]]


def _span(item: slice, size: int) -> Span | None:
    """None where the step is not forward."""
    if item.step is not None and operator.index(item.step) < 1:
        return None
    start, stop, step = item.indices(size)
    # Steps may be any number, but those of a box are those of an operator.
    return start, len(range(start, stop, step)), min(step, max(size, 1))


def _position(item: Any, size: int) -> int | None:
    """An int counted from the start of its dimension; None for what is no int or lies outside."""
    try:
        position = operator.index(item)
    except TypeError:
        return None
    return position % size if -size <= position < size else None


def _positions(item: Any, size: int) -> list[int] | None:
    """Of a list of ints; None for what is none or lies outside."""
    if getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"):
        item = item.tolist()
    if not isinstance(item, list | range) or not all(type(value) is int for value in item):
        return None
    positions = [_position(value, size) for value in item]
    return None if None in positions else [position for position in positions if position is not None]


def _runs(positions: list[int]) -> list[Span]:
    """Ascending positions as spans; one that is empty where there is none."""
    runs: list[Span] = []
    for position in positions:
        if runs and runs[-1][0] + runs[-1][1] == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1, 1
        else:
            runs.append((position, 1, 1))
    return runs or [(0, 0, 1)]


def stand_in(shape: Sequence[int]) -> Tensor:
    """A tensor of this shape that takes no memory, for PyTorch to say what is wrong with an index of it."""
    return torch.empty((), dtype=torch.uint8, device="cpu").expand(tuple(shape))
