"""Shards of a module's tensors that this rank holds."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from fst._ranks.dtensors import is_dtensor, local_tensor
from fst._ranks.meshes import MeshLayouts
from fst._ranks.shards import Replicated, ShardRequest, local_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def meshes_of(tensors: Iterable[Tensor]) -> "list[DeviceMesh]":
    """Returns the meshes of DTensors that contain this rank, in the order of the tensors."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor))
    return [mesh for mesh in meshes if mesh.get_coordinate() is not None]


def requested_shards(name: str, tensor: Tensor, layouts: MeshLayouts) -> Iterator[tuple[ShardRequest, Tensor]]:
    """Yields a request for each region of this rank's tensor, with the view that it fills."""
    if not is_dtensor(tensor):
        yield ShardRequest(name, Replicated()), tensor
    elif tensor.device_mesh.get_coordinate() is not None:
        local = local_tensor(tensor)
        layout = layouts.of(tensor.device_mesh, tensor.placements)
        for shard, region in local_shards(layout, tensor.shape):
            yield ShardRequest(name, shard), region.view(local)
