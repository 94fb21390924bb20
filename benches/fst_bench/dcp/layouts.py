"""Layouts of a checkpoint's tensors over ranks, as DTensors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ..checkpoint import TORCH_DTYPES
from ..workload import CUT_BY_COLUMNS, TensorSpec

# Placements of a tensor over the dimensions of the mesh.
Layout = Callable[[TensorSpec], Sequence[Placement]]


def _columns(tensor: TensorSpec) -> Sequence[Placement]:
    return [Shard(1) if len(tensor.shape) > 1 else Replicate()]


def _mixed(tensor: TensorSpec) -> Sequence[Placement]:
    if len(tensor.shape) == 1:
        return [Replicate()]
    return [Shard(1) if tensor.name.endswith(CUT_BY_COLUMNS) else Shard(0)]


LAYOUTS: dict[str, Layout] = {
    "replicated": lambda tensor: [Replicate()],
    "rows": lambda tensor: [Shard(0)],
    "columns": _columns,
    "mixed": _mixed,
}
LAYOUT_TITLES = {
    "replicated": "every tensor on every rank",
    "rows": "all tensors cut by rows, as by FSDP2",
    "columns": "matrices cut by columns",
    "mixed": "matrices cut by rows and columns, as by tensor parallelism",
}


def state_dict(tensors: Sequence[TensorSpec], layout: str, ranks: int) -> dict[str, DTensor]:
    """Returns DTensors of a layout over all ranks. Their elements are zero, and their memory is present."""
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for tensor in tensors:
        placements = LAYOUTS[layout](tensor)
        shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        local = torch.zeros(shape, dtype=TORCH_DTYPES[tensor.dtype])
        full = torch.Size(tensor.shape)
        stride = torch.empty(full, device="meta").stride()
        state[tensor.name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=full, stride=stride)
    return state


def shard(full: Tensor, tensor: DTensor) -> Tensor:
    """Returns the elements of a full tensor that are those of this rank in a DTensor."""
    lengths, offsets = compute_local_shape_and_global_offset(full.shape, tensor.device_mesh, tensor.placements)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        full = full.narrow(dim, offset, length)
    return full
