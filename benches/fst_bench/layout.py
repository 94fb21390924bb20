"""Layouts of tensors over the ranks of a group, as DTensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .checkpoint import TORCH_DTYPES
from .workload import CUT_BY_COLUMNS, TensorSpec

GROUP_SIZES = (2, 4)

# Dimension in which a layout cuts a tensor into one shard for each rank; None replicates the tensor.
Cut = Callable[[TensorSpec], int | None]


class Layout(NamedTuple):
    """Layout over a mesh of all ranks, or over two replicas of such a mesh."""

    title: str
    cut: Cut
    replicas: int = 1

    def mesh(self, ranks: int) -> DeviceMesh:
        """Returns the mesh. All ranks call this function."""
        shape = (ranks,) if self.replicas == 1 else (self.replicas, ranks // self.replicas)
        return init_device_mesh("cpu", shape)

    def placements(self, tensor: TensorSpec) -> list[Placement]:
        dim = self.cut(tensor)
        last = Replicate() if dim is None else Shard(dim)
        return [last] if self.replicas == 1 else [Replicate(), last]


def replicated(tensor: TensorSpec) -> int | None:
    return None


def rows(tensor: TensorSpec) -> int | None:
    return 0


def rows_of_matrices(tensor: TensorSpec) -> int | None:
    return 0 if len(tensor.shape) > 1 else None


def columns(tensor: TensorSpec) -> int | None:
    return 1 if len(tensor.shape) > 1 else None


def mixed(tensor: TensorSpec) -> int | None:
    return columns(tensor) if tensor.name.endswith(CUT_BY_COLUMNS) else rows_of_matrices(tensor)


def local_part(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Returns this rank's elements of a full tensor."""
    lengths, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        full = full.narrow(dim, offset, length)
    return full


def dtensor(tensor: TensorSpec, mesh: DeviceMesh, placements: Sequence[Any], make: Callable[..., Tensor]) -> DTensor:
    """Returns a DTensor whose shard of this rank `make` creates from a shape and a dtype."""
    shape = torch.Size(tensor.shape)
    lengths, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local, stride = make(lengths, dtype=TORCH_DTYPES[tensor.dtype]), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
