"""Plans of loads that fill tensors with views."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.region import Region
from fst._deferred.numbers import NumbersPiece
from fst._deferred.region import region_of
from fst._deferred.view import Dequantized, Held, Joined, Stored, View, stride_order

# Regions that one view may be split into. Beyond, it is copied out of a temporary tensor.
_PARTS_MAX = 4096


class Piece(NamedTuple):
    """Index region of a stored tensor, or None for all of it, and the memory that it fills."""

    stored: Stored
    region: Region | None
    out: Tensor


@dataclass
class FillPlan:
    """Pieces to load and copies to make, which together fill tensors.

    Attributes:
        pieces: What is loaded.
        numbers: What is dequantized.
        copies: What is copied afterwards, in this order: pairs of a source and a destination.
    """

    pieces: list[Piece] = field(default_factory=list)
    numbers: list[NumbersPiece] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, view: View, out: Tensor, parts_max: int = _PARTS_MAX) -> None:
        """Adds what fills a tensor with the values of a view of the same shape."""
        if out.numel() == 0:
            return
        base = view.base
        if isinstance(base, Held):
            self.copies.append((base.part(view.meta), out))
            return
        if isinstance(view.base, Stored) and view.is_whole() and out.is_contiguous():
            shape = view.base.meta.shape
            self.pieces.append(Piece(view.base, None, out if out.shape == shape else out.view(shape)))
            return
        order = stride_order(view.meta)
        view, out = view.permute(order), out.permute(order)
        region = region_of(view.meta, base.meta.shape)
        target = None if region is None else viewed(out, region.lengths)
        if region is None or target is None:
            self._split(view, out, parts_max)
        elif isinstance(base, Stored):
            self.pieces.append(Piece(base, region, target))
        elif isinstance(base, Dequantized):
            self._add_numbers(view, NumbersPiece(base, region, target), out)
        elif any(step != 1 for step in region.steps) or _rounds_twice(base, out.dtype):
            self._copy(view, out)
        else:
            self._add_inputs(base, region, target, parts_max)

    def _add_inputs(self, joined: Joined, region: Region, out: Tensor, parts_max: int) -> None:
        """Adds the parts of the inputs of a joined tensor that lie in a region."""
        dim = joined.dim
        if region.lengths == joined.meta.shape:
            sizes = [view.meta.shape[dim] for view in joined.inputs] if not joined.is_stack else []
            parts = out.unbind(dim) if joined.is_stack else out.split(sizes, dim)
            for view, part in zip(joined.inputs, parts, strict=True):
                self.add(view, part, parts_max)
            return
        first, wanted, _ = region[dim]
        begin = 0
        for view in joined.inputs:
            count = 1 if joined.is_stack else view.meta.shape[dim]
            low, high = max(first, begin), min(first + wanted, begin + count)
            if low < high:
                meta = view.meta.unsqueeze(dim) if joined.is_stack else view.meta
                part = region.replace(dim, (low - begin, high - low, 1)).view(meta)
                self.add(View(part, view.base), out.narrow(dim, low - first, high - low), parts_max)
            begin += count

    def _add_numbers(self, view: View, piece: NumbersPiece, out: Tensor) -> None:
        """Adds a region of a dequantized tensor, if need be by way of a temporary tensor with all of it."""
        if piece.is_possible():
            self.numbers.append(piece)
        else:
            self._copy(view, out)

    def _split(self, view: View, out: Tensor, parts_max: int) -> None:
        """Adds a view index by index of its shortest dim."""
        lengths = [(length, dim) for dim, length in enumerate(out.shape) if length > 1]
        length, dim = min(lengths, default=(parts_max + 1, 0))
        if length > parts_max or len(lengths) == 1:
            self._copy(view, out)
            return
        for index in range(length):
            self.add(view.select(dim, index), out.select(dim, index), parts_max // length)

    def _copy(self, view: View, out: Tensor) -> None:
        """Adds a view by way of a temporary tensor with all of `base`."""
        base = view.base.meta
        temporary = torch.empty(base.shape, dtype=base.dtype, device=out.device)
        self.add(View(base, view.base), temporary)
        meta = view.meta
        self.copies.append((temporary.as_strided(meta.shape, meta.stride(), meta.storage_offset()), out))


def _rounds_twice(joined: Joined, dtype: torch.dtype) -> bool:
    """Returns whether a cast of the inputs to `dtype` differs from one to the dtype of the joined tensor and on."""
    return joined.meta.dtype != dtype and any(view.meta.dtype != joined.meta.dtype for view in joined.inputs)


def viewed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Returns a view of another shape, or None if the elements are in another order."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None
