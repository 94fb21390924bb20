"""Local part of a tensor that is sharded over a device mesh."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from fst._checkpoint.region import Region
from fst._distributed.shards import Replicated, Shard, Sharded, chunk_of


class MeshShard(NamedTuple):
    """Placement of a tensor dimension that a mesh dimension shards as `torch.chunk` does.

    Attributes:
        dim: Dimension of the tensor, not negative.
        split_factor: Number of chunks that the dimension is split into first. The mesh dimension shards each of them,
            and a rank holds its shards of all chunks, concatenated.
    """

    dim: int
    split_factor: int


class MeshPosition(NamedTuple):
    """Position of this rank in a device mesh.

    Attributes:
        shape: Number of ranks in each mesh dimension.
        coordinate: Coordinate of this rank.
        is_group: Whether the mesh has one dimension, with the ranks of the loading group in the same order.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    is_group: bool


class LocalRegion(NamedTuple):
    """Region of a local tensor and the shard of the full tensor that it holds."""

    shard: Shard
    region: Region


class LocalLayout(NamedTuple):
    """Composition of a local tensor.

    Attributes:
        shape: Shape of the local tensor.
        regions: Regions that make up the local tensor: one, several if its indices are not contiguous in the full
            tensor, or none if it is empty.
    """

    shape: tuple[int, ...]
    regions: list[LocalRegion]


def local_layout(shape: Sequence[int], mesh_shards: Sequence[MeshShard | None], position: MeshPosition) -> LocalLayout:
    """Returns the layout of this rank's local tensor.

    Args:
        shape: Shape of the full tensor.
        mesh_shards: One item for each mesh dimension, `None` where the tensor is replicated. They apply in order, each
            to the shard that the previous ones leave.
        position: Position of this rank in the mesh.
    """
    # The indices that this rank holds, as ascending ranges for each dimension of the tensor.
    indices = [_merge([range(length)]) for length in shape]
    effective: list[MeshShard] = []
    for mesh_shard, size, coordinate in zip(mesh_shards, position.shape, position.coordinate, strict=True):
        if mesh_shard is not None and size > 1:
            dim, split_factor = mesh_shard
            chunks = [_chunk(indices[dim], index, split_factor) for index in range(split_factor)]
            indices[dim] = _merge(part for chunk in chunks for part in _chunk(chunk, coordinate, size))
            effective.append(mesh_shard)
    local_shape = tuple(sum(map(len, ranges)) for ranges in indices)
    whole = Region.whole(local_shape)
    # Requests that are equal on all ranks make the plan agreement cheaper.
    if not effective:
        return LocalLayout(local_shape, [LocalRegion(Replicated(), whole)])
    if position.is_group and effective[0].split_factor == 1:
        return LocalLayout(local_shape, [LocalRegion(Sharded(effective[0].dim), whole)])
    return LocalLayout(local_shape, [_local_region(parts) for parts in product(*map(_with_offsets, indices))])


def _chunk(ranges: Sequence[range], index: int, count: int) -> list[range]:
    """Returns chunk `index` if `torch.chunk` splits the concatenated ranges into `count` chunks."""
    chunk = chunk_of(sum(map(len, ranges)), index, count)
    parts = []
    for offset, indices in _with_offsets(ranges):
        part = indices[max(chunk.start - offset, 0) : max(chunk.stop - offset, 0)]
        if part:
            parts.append(part)
    return parts


def _merge(ranges: Iterable[range]) -> list[range]:
    """Joins adjacent ranges and drops empty ones."""
    merged: list[range] = []
    for indices in ranges:
        if merged and merged[-1].stop == indices.start:
            merged[-1] = range(merged[-1].start, indices.stop)
        elif indices:
            merged.append(indices)
    return merged


def _with_offsets(ranges: Iterable[range]) -> Iterator[tuple[int, range]]:
    """Yields each range with its offset in the concatenated ranges."""
    offset = 0
    for indices in ranges:
        yield offset, indices
        offset += len(indices)


def _local_region(parts: Sequence[tuple[int, range]]) -> LocalRegion:
    """Returns the region that the ranges of all dimensions select. Each range comes with its local offset."""
    shard = Region((indices.start, len(indices), 1) for _, indices in parts)
    return LocalRegion(shard, Region((offset, len(indices), 1) for offset, indices in parts))
