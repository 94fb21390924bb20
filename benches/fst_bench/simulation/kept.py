"""Bytes that ranks keep, computed without the planner, to check its reads and sends."""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..checkpoint import header_of
from ..planner import ShardRequest, region_of
from ..workload import ITEM_BYTES, TensorSpec
from .model import Model

# A position in a checkpoint is one number: the file's number above these bits, the byte's offset below.
FILE_BITS = 44


class Kept:
    """Bytes that one rank keeps: of each tensor, a length from a start, repeated with a period."""

    def __init__(self, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T
        self._begins, self._sizes, self._starts, self._lengths, self._periods = columns

    @property
    def size_bytes(self) -> int:
        return int((self._sizes // self._periods * self._lengths).sum())

    def within(self, ranges: Tensor) -> int:
        """Returns how many of the bytes are in these ranges, each a row of file, begin and end."""
        files, begins, ends = ranges.numpy().T
        begins, ends = (files << FILE_BITS) + begins, (files << FILE_BITS) + ends
        first = np.searchsorted(self._begins + self._sizes, begins, "right")
        count = np.searchsorted(self._begins, ends, "left") - first
        of_range = np.repeat(np.arange(len(first)), count)
        tensors = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + first[of_range]
        last, before = (self._before(tensors, positions[of_range]) for positions in (ends, begins))
        return int((last - before).sum())

    def _before(self, tensors: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns for each tensor how many of its bytes precede a position."""
        offset = np.clip(positions - self._begins[tensors], 0, self._sizes[tensors])
        rows, rest = np.divmod(offset, self._periods[tensors])
        lengths = self._lengths[tensors]
        return rows * lengths + np.clip(rest - self._starts[tensors], 0, lengths)


class TensorPositions:
    """Positions of a model's tensors in its files."""

    def __init__(self, model: Model) -> None:
        self._begins: dict[str, int] = {}
        self._tensors: dict[str, TensorSpec] = {}
        for number, file in enumerate(model.files):
            begin = (number << FILE_BITS) + len(header_of(file))
            for tensor in file:
                self._tensors[tensor.name] = tensor
                self._begins[tensor.name] = begin
                begin += tensor.size_bytes

    def kept(self, requests: Iterable[ShardRequest], rank: int, ranks: int) -> Kept:
        """Returns the bytes that a rank with these requests keeps. No request cuts its tensor in two dimensions."""
        return Kept([self._row(request, rank, ranks) for request in requests])

    def _row(self, request: ShardRequest, rank: int, ranks: int) -> tuple[int, int, int, int, int]:
        tensor = self._tensors[request.name]
        starts, lengths = region_of(request.shard, tensor.shape, rank, ranks)
        dim = next((dim for dim, length in enumerate(lengths) if length != tensor.shape[dim]), 0)
        inner = prod(tensor.shape[dim + 1 :]) * ITEM_BYTES[tensor.dtype]
        cut = starts[dim] * inner, lengths[dim] * inner, tensor.shape[dim] * inner
        return self._begins[request.name], tensor.size_bytes, *cut
