"""DTensors, and what their placements mean for the rank that has a part."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module

from fst._distributed.layout import Cut, Local, local_of
from fst._distributed.meshes import grid_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a `DTensor`. If it is, somebody has imported that module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: "DTensor") -> Tensor:
    """What this rank has of it, in the same memory."""
    with torch.no_grad():
        return tensor.to_local()


def reshard(module: Module) -> None:
    """Has `fully_shard` take back the whole parameters that it may have left in place of its DTensors after a call."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for child in module.modules():
            if isinstance(child, fsdp.FSDPModule):
                child.reshard()


def part_of_rank(tensor: "DTensor", group: "ProcessGroup | None" = None) -> Local:
    """Which part of it this rank has, which is in its mesh. The ranks of `group`, if given, load it together."""
    return local_of(tensor.shape, cuts_of(tensor.placements), grid_of(tensor.device_mesh, group))


def normal(placements: Sequence[Any], dims: int, mesh_dims: int) -> "list[Placement]":
    """Placements as DTensors have them, with dimensions from 0.

    Args:
        placements: What a caller gave for a tensor.
        dims: The number of dimensions of the tensor.
        mesh_dims: The number of dimensions of the mesh.

    Raises:
        TypeError, ValueError: They are none, or not for such a tensor or mesh.
    """
    if len(placements) != mesh_dims:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh_dims} dimensions; give one for each")
    return [_normal(placement, dims) for placement in placements]


def cuts_of(placements: Sequence[Any]) -> list[Cut | None]:
    """What normal placements do to a tensor: for each dimension of the mesh the cut, or None where it has copies."""
    return [
        Cut(placement.dim, getattr(placement, "split_factor", 1)) if hasattr(placement, "dim") else None
        for placement in placements
    ]


def _normal(placement: Any, dims: int) -> "Placement":
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return placement
    if isinstance(placement, Partial):
        raise ValueError(f"{placement!r} is for terms of a sum that is still to be made, which no file holds")
    if not isinstance(placement, Shard | _StridedShard):
        raise TypeError(f"{placement!r} is no placement; expected Replicate(), Shard(dim) or None")
    if not -dims <= placement.dim < dims:
        raise ValueError(f"{placement!r} does not fit a tensor of {dims} dimensions")
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim % dims, split_factor=placement.split_factor)
    return Shard(placement.dim % dims)
