"""DTensors: recognition, placements and local layout."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether a tensor is a `DTensor`. Does not import its module, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: "DTensor") -> Tensor:
    """Returns the local tensor of a DTensor, with the same storage and without autograd."""
    with torch.no_grad():
        return tensor.to_local()


def reshard(module: Module) -> None:
    """Reshards the parameters that `fully_shard` may have left unsharded after a forward pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for child in module.modules():
            if isinstance(child, fsdp.FSDPModule):
                child.reshard()


def normalize_placements(placements: Sequence[Any], ndim: int, mesh_ndim: int) -> "tuple[Placement, ...]":
    """Returns placements as DTensors hold them, with non-negative dimensions.

    Raises a TypeError or ValueError for placements that do not fit a tensor of `ndim` dimensions, or the mesh.
    """
    if len(placements) != mesh_ndim:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh_ndim} dimensions; pass one for each")
    return tuple([_normalize(placement, ndim) for placement in placements])


def _normalize(placement: Any, ndim: int) -> "Placement":
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return placement
    if isinstance(placement, Partial):
        raise ValueError(f"{placement!r} is a pending reduction, which files do not hold")
    if not isinstance(placement, Shard | _StridedShard):
        raise TypeError(f"{placement!r} is not a placement; expected Replicate(), Shard(dim) or None")
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"{placement!r} does not fit a tensor of {ndim} dimensions")
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim % ndim, split_factor=placement.split_factor)
    return Shard(placement.dim % ndim)
