"""State dicts of DTensors that the ranks save."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..workload import TensorSpec, Workload

RANKS = (2, 4)


class Layout(NamedTuple):
    """Layout of a state dict.

    Attributes:
        title: Text for the tables.
        mesh_shape: Returns the shape of the mesh of a number of ranks.
        placements: Returns the placements of a tensor.
    """

    title: str
    mesh_shape: Callable[[int], tuple[int, ...]]
    placements: Callable[[TensorSpec], Sequence[Placement]]


LAYOUTS = {
    "rows": Layout("FSDP2, cut by rows", lambda ranks: (ranks,), lambda tensor: [Shard(0)]),
    "columns": Layout(
        "tensor-parallel, matrices cut by columns",
        lambda ranks: (ranks,),
        lambda tensor: [Shard(1) if len(tensor.shape) > 1 else Replicate()],
    ),
    "replicated": Layout("every tensor on every rank", lambda ranks: (ranks,), lambda tensor: [Replicate()]),
    "hsdp": Layout(
        "HSDP, rows cut in each of two replicas", lambda ranks: (2, ranks // 2), lambda tensor: [Replicate(), Shard(0)]
    ),
}


def full_tensor(tensor: TensorSpec) -> Tensor:
    """Returns the values of a tensor, which follow from its name."""
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(1 << 15), 1 << 15, tensor.shape, dtype=torch.int16, generator=generator)
    # No NaN, which is not equal to itself.
    return values.bitwise_and_(~0x4000).view(torch.bfloat16)


def make_mesh(layout: str, ranks: int) -> DeviceMesh:
    """Returns the mesh of a layout. All ranks call this function."""
    return init_device_mesh("cpu", LAYOUTS[layout].mesh_shape(ranks))


def make_state(workload: Workload, layout: str, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Returns the DTensors of a rank."""
    placements = LAYOUTS[layout].placements
    state = {}
    for tensor in workload.tensors:
        sharded = distribute_tensor(full_tensor(tensor), mesh, placements(tensor), src_data_rank=None)
        # The shard must not keep the memory of the full tensor.
        local = sharded.to_local().clone(memory_format=torch.contiguous_format)
        state[tensor.name] = DTensor.from_local(
            local, mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
        )
    return state
