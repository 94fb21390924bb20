"""Which part of a tensor a rank has, where the tensor is cut over a mesh of ranks."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from fst._checkpoint.region import Region
from fst._distributed.shards import Chunk, Share, Whole

# Indices of a dimension: the first, and how many.
Run = tuple[int, int]


class Cut(NamedTuple):
    """A dimension of a tensor that is cut over a dimension of a mesh, as `torch.chunk` cuts.

    Attributes:
        dim: The dimension of the tensor, not negative.
        pieces: Into how many pieces it is cut first. Each piece is then cut over the mesh, and a rank has its chunk of
            every piece, one behind the other.
    """

    dim: int
    pieces: int


class Grid(NamedTuple):
    """A mesh of ranks, as one of them sees it.

    Attributes:
        shape: How many ranks there are in each dimension.
        coordinate: Where this rank is: in each dimension its place among the ranks beside it.
        is_group: Whether there is one dimension, and the ranks in it are those that load together, in their order.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    is_group: bool


class Fragment(NamedTuple):
    """Some of a tensor that a rank has.

    Attributes:
        share: What it is of the whole tensor.
        place: Where it is in what the rank has.
    """

    share: Share
    place: Region


class Local(NamedTuple):
    """What a rank has of a tensor.

    Attributes:
        shape: Its shape.
        fragments: What it is made of: one box, or several where its rows come from several places, or none.
    """

    shape: tuple[int, ...]
    fragments: list[Fragment]


def local_of(shape: Sequence[int], cuts: Sequence[Cut | None], grid: Grid) -> Local:
    """What this rank has of a tensor.

    The cuts, one for each dimension of the mesh, or None where that has copies, are made in their order, each in what
    those before it have left.
    """
    runs = [_joined([(0, length)]) for length in shape]
    real: list[Cut] = []
    for cut, count, index in zip(cuts, grid.shape, grid.coordinate, strict=True):
        if cut is not None and count > 1:
            pieces = [_chunk(runs[cut.dim], piece, cut.pieces) for piece in range(cut.pieces)]
            runs[cut.dim] = _joined(run for piece in pieces for run in _chunk(piece, index, count))
            real.append(cut)
    local_shape = tuple(sum(length for _, length in dim) for dim in runs)
    everything = Region.whole(local_shape)
    # Where all ranks say the same, they have less to tell each other.
    if not real:
        return Local(local_shape, [Fragment(Whole(), everything)])
    if grid.is_group and real[0].pieces == 1:
        return Local(local_shape, [Fragment(Chunk(real[0].dim), everything)])
    placed = [list(_placed(dim)) for dim in runs]
    return Local(local_shape, [_fragment(spans) for spans in product(*placed)])


def _chunk(runs: Iterable[Run], index: int, count: int) -> list[Run]:
    """The part of some indices that `torch.chunk` gives to one of `count`."""
    runs = list(runs)
    total = sum(length for _, length in runs)
    step = -(-total // count)
    begin, end = index * step, (index + 1) * step
    chunk = []
    for place, (start, length) in _placed(runs):
        first, last = max(begin - place, 0), min(end - place, length)
        if first < last:
            chunk.append((start + first, last - first))
    return chunk


def _joined(runs: Iterable[Run]) -> list[Run]:
    """The same indices, with no run that is empty or goes on where the one before it ends."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        elif length > 0:
            joined.append((start, length))
    return joined


def _placed(runs: Iterable[Run]) -> Iterator[tuple[int, Run]]:
    """Runs, and where each begins when they stand one behind the other."""
    place = 0
    for start, length in runs:
        yield place, (start, length)
        place += length


def _fragment(spans: Sequence[tuple[int, Run]]) -> Fragment:
    share = Region((start, length, 1) for _, (start, length) in spans)
    return Fragment(share, Region((place, length, 1) for place, (_, length) in spans))
