"""Ranks, process groups and devices of a `DeviceMesh`."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fst._core.arguments import device_of
from fst._distributed.layout import MeshPosition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def is_device_mesh(value: object) -> bool:
    """Returns whether a value is a `DeviceMesh`. Does not import its module, which is slow."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def mesh_device(mesh: "DeviceMesh") -> torch.device:
    """Returns the device of this rank's tensors on a mesh: the current device of the mesh's type."""
    return torch.empty(0, device=device_of(mesh.device_type)).device


def mesh_ranks(mesh: "DeviceMesh") -> list[int]:
    """Returns the global ranks of a mesh, in the order of the mesh."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def mesh_position(mesh: "DeviceMesh", process_group: "ProcessGroup | None") -> MeshPosition:
    """Returns this rank's position in a mesh that contains it, for a load by the ranks of a process group."""
    # `get_local_rank` follows the order of the mesh, which may differ from the order of the global ranks.
    coordinate = tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))
    is_group = False
    if mesh.ndim == 1 and process_group is not None:
        mesh_order = dist.get_process_group_ranks(mesh.get_group())
        is_group = dist.get_process_group_ranks(process_group) == mesh_order
    return MeshPosition(tuple(mesh.shape), coordinate, is_group)


def mesh_group(mesh: "DeviceMesh") -> "ProcessGroup":
    """Returns an existing process group of all ranks of a mesh. Raises a ValueError if there is none."""
    ranks = sorted(mesh_ranks(mesh))
    for process_group in _candidate_groups(mesh):
        if sorted(dist.get_process_group_ranks(process_group)) == ranks:
            return process_group
    # Creating one here would need all ranks of the world, and only some of them may load.
    raise ValueError(
        f"PyTorch has no process group of all ranks of the mesh, which are {ranks}; call mesh._flatten() first on all "
        "ranks of the world, which creates one, or pass a process group of these ranks as group="
    )


def check_group(process_group: "ProcessGroup", mesh: "DeviceMesh") -> None:
    """Raises ValueError if the ranks of a process group are not the ranks of a mesh."""
    in_mesh, in_group = sorted(mesh_ranks(mesh)), sorted(dist.get_process_group_ranks(process_group))
    if in_mesh != in_group:
        raise ValueError(
            f"group has the ranks {in_group}, and the mesh {in_mesh}; pass a process group of the mesh's ranks"
        )


def enclosing_mesh(meshes: Sequence["DeviceMesh"]) -> "DeviceMesh":
    """Returns the mesh that contains the ranks of all meshes. Raises a ValueError if none does."""
    all_ranks = {rank for mesh in meshes for rank in mesh_ranks(mesh)}
    for mesh in meshes:
        if all_ranks == set(mesh_ranks(mesh)):
            return mesh
    lists = ", ".join(dict.fromkeys(str(sorted(mesh_ranks(mesh))) for mesh in meshes))
    raise ValueError(
        f"the module's DTensors are on meshes of the ranks {lists}, and no mesh contains all of these ranks; pass the "
        "ranks that load together as group="
    )


def _candidate_groups(mesh: "DeviceMesh") -> Iterator["ProcessGroup"]:
    yield from mesh.get_all_groups()
    if dist.group.WORLD is not None:
        yield dist.group.WORLD
    if mesh.ndim > 1:
        # PyTorch has no public access to flattened meshes.
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        for flat in getattr(root, "_flatten_mapping", {}).values():
            yield flat.get_group()
