"""The ranks of a `DeviceMesh`, as those who load together."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fst._core.arguments import device_of
from fst._distributed.layout import Grid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def is_mesh(value: object) -> bool:
    """Whether something is a `DeviceMesh`. If it is, somebody has imported that module, which takes long."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def device_of_mesh(mesh: "DeviceMesh") -> torch.device:
    """Where this rank's tensors of a mesh are: the current device of its kind."""
    return torch.empty(0, device=device_of(mesh.device_type)).device


def ranks_of(mesh: "DeviceMesh") -> list[int]:
    """The ranks of the world that are in a mesh, in the order of the mesh."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def grid_of(mesh: "DeviceMesh", group: "ProcessGroup | None") -> Grid:
    """A mesh as this rank, which is in it, sees it in a load by the ranks of a group."""
    # Where ranks are not in their order in a mesh, PyTorch's collectives put them into it.
    place = tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))
    in_line = mesh.ndim == 1 and group is not None
    is_group = in_line and dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mesh.get_group())
    return Grid(tuple(mesh.shape), place, is_group)


def group_of(mesh: "DeviceMesh") -> "ProcessGroup":
    """The process group of the ranks of a mesh.

    Raises:
        ValueError: There is none.
    """
    ranks = sorted(ranks_of(mesh))
    for group in _groups_about(mesh):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    # It is not made here: that takes all ranks of the world, and who knows whether they all load.
    raise ValueError(
        f"PyTorch has no process group of all ranks of the mesh, which are {ranks}; call mesh._flatten() before on all "
        "ranks of the world, which makes one, or give another group of these ranks as group="
    )


def check_group(group: "ProcessGroup", mesh: "DeviceMesh") -> None:
    """Raises ValueError if these are not the ranks of a mesh."""
    in_mesh, in_group = sorted(ranks_of(mesh)), sorted(dist.get_process_group_ranks(group))
    if in_mesh != in_group:
        raise ValueError(f"group has the ranks {in_group}, and the mesh {in_mesh}; give a group of the mesh's ranks")


def widest(meshes: Sequence["DeviceMesh"]) -> "DeviceMesh":
    """The mesh that has the ranks of all of them.

    Raises:
        ValueError: None has.
    """
    everyone = {rank for mesh in meshes for rank in ranks_of(mesh)}
    for mesh in meshes:
        if everyone == set(ranks_of(mesh)):
            return mesh
    lists = ", ".join(dict.fromkeys(str(sorted(ranks_of(mesh))) for mesh in meshes))
    raise ValueError(
        f"the module's DTensors are on meshes of the ranks {lists}, and no mesh has all of these; say with group= "
        "which ranks load together"
    )


def _groups_about(mesh: "DeviceMesh") -> Iterator["ProcessGroup"]:
    yield from mesh.get_all_groups()
    if dist.group.WORLD is not None:
        yield dist.group.WORLD
    if mesh.ndim > 1:
        # Where PyTorch keeps the meshes of one dimension that were made of several, and no function tells of them.
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        for flat in getattr(root, "_flatten_mapping", {}).values():
            yield flat.get_group()
