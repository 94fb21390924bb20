"""Layouts of tensors that are sharded over a device mesh."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from fst._checkpoint.region import Region
from fst._core import ops

# Numbers of the kinds of layouts in their encoding, as rust/ranks/layout.rs decodes them.
MESH, BOXES, WHOLE, CHUNK = range(4)

# Placement on a mesh dimension: the dimension of the tensor that the mesh dimension shards as `torch.chunk` does, not
# negative, and the number of chunks that it is split into first. The mesh dimension shards each of these, and a rank
# holds its shards of all chunks, concatenated.
Placement = tuple[int, int]
REPLICATED: Placement = (-1, 0)


class LocalTensor(NamedTuple):
    """Composition of a local tensor.

    Attributes:
        shape: Shape of the local tensor.
        regions: Regions of the full tensor that make up the local tensor, each with its region of the local tensor:
            one, several if its indices are not contiguous in the full tensor, or none if it is empty.
    """

    shape: tuple[int, ...]
    regions: list[tuple[Region, Region]]

    @property
    def region(self) -> Region:
        """The region of the full tensor if it is one. The region of an empty tensor has its shape."""
        return self.regions[0][0] if self.regions else Region.whole(self.shape)


class MeshLayout:
    """Layout of tensors of any shape over a mesh.

    Args:
        shape: Number of ranks in each mesh dimension.
        ranks: Ranks of the mesh in row-major order, as the group that loads together numbers them. `None` if it does
            not contain all of them: the planner cannot know the layout then.
        placements: One for each mesh dimension. They apply in order, each to the shard that the previous ones leave.
        coordinate: Coordinate of this rank.

    Attributes:
        is_known: Whether `MeshLayout` can express the placements.
        is_replicated: Whether every rank holds whole tensors.
    """

    def __init__(
        self,
        shape: Sequence[int],
        ranks: Sequence[int] | None,
        placements: Sequence[Placement],
        coordinate: Sequence[int],
    ) -> None:
        numbers = tuple(number for placement in placements for number in placement)
        self._position = tuple(shape), numbers, tuple(coordinate)
        self._ranks = ranks
        self.is_known = ranks is not None
        self.is_replicated = all(
            placement == REPLICATED or size == 1 for placement, size in zip(placements, shape, strict=True)
        )

    def encode(self) -> tuple[int, ...]:
        """Encodes a known layout. The numbers are equal on all ranks of the mesh."""
        assert self._ranks is not None
        shape, placements, _ = self._position
        return MESH, *_encode(shape, self._ranks, placements)

    def local(self, shape: Sequence[int]) -> LocalTensor:
        """Returns the composition of this rank's local tensor of a tensor with this shape."""
        return _local_tensor(*self._position, tuple(shape))


def encode_box(rank: int, starts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Encodes an index region of a rank."""
    return BOXES, 1, len(starts), rank, *starts, *lengths


def _encode(shape: Sequence[int], ranks: Iterable[int], placements: Iterable[int]) -> tuple[int, ...]:
    return len(shape), *shape, *ranks, *placements


@lru_cache(maxsize=4096)
def _local_tensor(
    mesh_shape: tuple[int, ...], placements: tuple[int, ...], coordinate: tuple[int, ...], shape: tuple[int, ...]
) -> LocalTensor:
    # Indices do not depend on the numbers of the ranks.
    layout = _encode(mesh_shape, range(math.prod(mesh_shape)), placements)
    ranges_of = ops.call("mesh_indices", [layout, shape, coordinate])
    indices = [[range(start, end) for start, end in ranges] for ranges in ranges_of]
    regions = [
        (
            Region((part.start, len(part), 1) for _, part in parts),
            Region((offset, len(part), 1) for offset, part in parts),
        )
        for parts in product(*map(_with_offsets, indices))
    ]
    return LocalTensor(tuple(sum(map(len, ranges)) for ranges in indices), regions)


def _with_offsets(ranges: Iterable[range]) -> Iterator[tuple[int, range]]:
    """Yields each range with its offset in the concatenated ranges."""
    offset = 0
    for indices in ranges:
        yield offset, indices
        offset += len(indices)
