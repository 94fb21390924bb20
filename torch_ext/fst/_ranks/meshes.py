"""Ranks, process groups and devices of a `DeviceMesh`."""

import sys
from collections.abc import Iterator, Sequence, Set
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.arguments import device_of
from fst._ranks.layout import REPLICATED, MeshLayout
from fst._ranks.layout import Placement as MeshPlacement

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


def mesh_coordinate(mesh: "DeviceMesh") -> tuple[int, ...]:
    """Returns this rank's coordinate in a mesh that contains it."""
    # Collectives sort the ranks of each mesh dimension, and `get_local_rank` counts in that order.
    return tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))


class MeshLayouts:
    """Layouts over meshes that contain this rank, for a load by the ranks of a process group.

    Without a process group, the planner knows none of them.
    """

    def __init__(self, process_group: "ProcessGroup | None") -> None:
        ranks = [] if process_group is None else dist.get_process_group_ranks(process_group)
        self._group_ranks = {rank: index for index, rank in enumerate(ranks)}
        self._places: dict[DeviceMesh, _Place] = {}
        self._layouts: dict[tuple[DeviceMesh, tuple[Any, ...]], MeshLayout] = {}

    def of(self, mesh: "DeviceMesh", placements: Sequence[Any]) -> MeshLayout:
        """Returns the layout of normalized placements on a mesh, always the same object."""
        key = mesh, tuple(placements)
        layout = self._layouts.get(key)
        if layout is None:
            place = self._places.get(mesh)
            if place is None:
                place = self._places[mesh] = self._place(mesh)
            of_mesh = [REPLICATED] * (len(place.shape) - mesh.ndim) + mesh_placements(placements)
            layout = self._layouts[key] = MeshLayout(place.shape, place.ranks, of_mesh, place.coordinate)
        return layout

    def _place(self, mesh: "DeviceMesh") -> "_Place":
        """Describes a mesh, and its copies among the ranks of the group as one mesh with another dimension.

        All ranks of all copies have the same description.
        """
        coordinate = mesh_coordinate(mesh)
        own_place = _Place(tuple(mesh.shape), None, coordinate)
        if not self._group_ranks:
            return own_place
        rank = dist.get_rank()
        copies = _copies(mesh, rank, self._group_ranks.keys())
        for dim in range(1, copies.ndim):
            copies = copies.sort(dim).values
        [[copy, *position]] = (copies == rank).nonzero().tolist()
        ranks = copies.flatten().tolist()
        if tuple(position) != coordinate or not self._group_ranks.keys() >= set(ranks):
            return own_place
        numbers = tuple(self._group_ranks[rank] for rank in ranks)
        if len(copies) == 1:
            return own_place._replace(ranks=numbers)
        return _Place(tuple(copies.shape), numbers, (copy, *coordinate))


def mesh_placements(placements: Sequence[Any]) -> list[MeshPlacement]:
    """Returns normalized placements as a `MeshLayout` takes them."""
    return [
        (placement.dim, getattr(placement, "split_factor", 1)) if hasattr(placement, "dim") else REPLICATED
        for placement in placements
    ]


class _Place(NamedTuple):
    """Place of this rank in a mesh. `ranks` are numbers of the group, or `None` if the group does not have them all."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    coordinate: tuple[int, ...]


def _copies(mesh: "DeviceMesh", rank: int, group_ranks: Set[int]) -> Tensor:
    """Returns the ranks of a mesh and of its copies in the group: parallel parts of the mesh that it is a part of."""
    own: Tensor = mesh.mesh
    # PyTorch has no public access to the mesh of which another is a part.
    root: Tensor = mesh._get_root_mesh().mesh if hasattr(mesh, "_get_root_mesh") else own
    for _, whole in _parts(root, rank):
        if whole.numel() == len(group_ranks) and group_ranks == set(whole.flatten().tolist()):
            for dims, part in _parts(whole, rank):
                if torch.equal(part.flatten(), own.flatten()):
                    others = [dim for dim in range(whole.ndim) if dim not in dims]
                    return whole.permute(*others, *dims).reshape(-1, *own.shape)
    return own[None]


def _parts(mesh: Tensor, rank: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yields the parts of a mesh that contain a rank, each with the dimensions of the mesh that it has."""
    for [*place] in (mesh == rank).nonzero().tolist():
        for are_kept in product([True, False], repeat=mesh.ndim):
            index = tuple(slice(None) if is_kept else at for is_kept, at in zip(are_kept, place, strict=True))
            yield [dim for dim, is_kept in enumerate(are_kept) if is_kept], mesh[index]


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
