"""Cost of opening and planning a load or a save, for one rank of a large group that is simulated in one process.

The rank runs `fst.load_distributed` until all ranks have agreed on the plan, or `fst.save_distributed` until this rank
also has its part of the plan and has opened the files. Collectives count bytes instead of moving them: every rank of the group sends the same messages, but for
those of the first rank, which the last one gets.
"""

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fst
from fst._distributed import group_save, load
from fst._distributed.agreement import agree_on_plan
from fst._distributed.exchange import Exchange
from fst._save.shards import CheckpointFiles

from ..workload import TensorSpec
from .layout import BY_COLUMNS, BY_ROWS, NODE_RANKS

# Forks of a process without threads.
_CONTEXT = get_context("forkserver")


class Cost(NamedTuple):
    """Cost of one rank until all ranks have agreed on the plan.

    Attributes:
        cpu_seconds: CPU time.
        sent_bytes, received_bytes: Bytes that collectives take from this rank, and give it from others.
        memory_bytes: Growth of the largest resident memory.
    """

    cpu_seconds: float
    sent_bytes: int
    received_bytes: int
    memory_bytes: int


class PlannedLayout(NamedTuple):
    """Layout of all tensors over a mesh of one dimension, or of nodes and their ranks.

    Attributes:
        title: Text for the tables.
        mesh_ndim: Number of dimensions of the mesh.
        placements: Placement of all tensors, or a function that returns those of a tensor of a name and a shape.
    """

    title: str
    mesh_ndim: int
    placements: Any

    def mesh_shape(self, ranks: int) -> tuple[int, ...]:
        """Returns the shape of the mesh for a number of ranks."""
        return (ranks,) if self.mesh_ndim == 1 else (ranks // NODE_RANKS, NODE_RANKS)


# As `parallelize_module` and `fully_shard` place tensors together.
_ROWS = [_StridedShard(0, split_factor=NODE_RANKS), Shard(0)]
_COLUMNS = [Shard(0), Shard(1)]
_REST = [Shard(0), Replicate()]


def _with_tensor_parallel(name: str, shape: torch.Size) -> Sequence[Any]:
    module = name.split(".")[-2]
    return _ROWS if module in BY_ROWS else _COLUMNS if module in BY_COLUMNS else _REST


PLANNED: Sequence[PlannedLayout] = (
    PlannedLayout("FSDP", 1, Shard(0)),
    PlannedLayout("FSDP + tensor-parallel in each node", 2, _with_tensor_parallel),
)


class _Planned(BaseException):
    """Ends a load or a save that is planned."""


@dataclass
class _Collectives:
    """Collectives of one rank, of which all others but the first send what it does.

    Attributes:
        rank, ranks: This rank, and the number of ranks.
        broadcasts: Data of broadcasts: those that rank 0 has sent, or will receive from it.
        messages: Messages of rank 0 to all: those that it has sent, or those that this rank will receive.
    """

    rank: int
    ranks: int
    broadcasts: list[bytes]
    messages: list[bytes]
    sent_bytes: int = 0
    received_bytes: int = 0

    def broadcast(self, data: Tensor, group: Any, group_src: int, async_op: bool) -> Any:
        if group_src != 0:
            raise ValueError(f"rank {group_src} broadcasts, so ranks send different requests")
        if self.rank == 0:
            self.broadcasts.append(data.numpy().tobytes())
            self.sent_bytes += data.nbytes
        else:
            data.copy_(torch.frombuffer(bytearray(self.broadcasts.pop(0)), dtype=data.dtype))
            self.received_bytes += data.nbytes
        return mock.Mock()

    def all_to_all_single(self, received: Tensor, data: Tensor, group: Any, async_op: bool) -> Any:
        received.copy_(data)
        first = received.view(self.ranks, -1)[0]
        if self.rank == 0:
            self.messages.append(first.numpy().tobytes())
        else:
            first.copy_(torch.frombuffer(bytearray(self.messages.pop(0)), dtype=data.dtype))
        self.sent_bytes += data.nbytes - first.nbytes
        self.received_bytes += data.nbytes - first.nbytes
        return mock.Mock()


class _NoExchange(Exchange):
    """Exchange of a planned save, which ends there."""

    def run(self) -> None:
        raise _Planned


def _agree_on_plan(*arguments: Any) -> None:
    """Agrees on the plan of a load, which ends there."""
    agree_on_plan(*arguments)
    raise _Planned


def _prepare_load(paths: Sequence[Path], layout: PlannedLayout, mesh: DeviceMesh) -> Callable[[], object]:
    """Returns a load of the files."""
    # Loads to a GPU do not map files either.
    os.environ["FST_READER"] = "pread"
    return partial(fst.load_distributed, list(map(str, paths)), mesh, layout.placements)


def _prepare_save(
    tensors: Sequence[TensorSpec], directory: Path, layout: PlannedLayout, mesh: DeviceMesh
) -> Callable[[], object]:
    """Returns a save of tensors in new files of holes."""
    state_dict = {}
    for spec in tensors:
        shape = torch.Size(spec.shape)
        placements = layout.placements(spec.name, shape) if callable(layout.placements) else [layout.placements]
        local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        # No memory is touched.
        tensor = torch.empty(local, dtype=torch.bfloat16)
        stride = torch.empty(shape, device="meta").stride()
        state_dict[spec.name] = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
    return partial(fst.save_distributed, state_dict, directory)


def _create_sparse(files: CheckpointFiles, lengths: Sequence[int]) -> list[str]:
    for path, length in zip(files.staged, lengths, strict=True):
        path.touch()
        os.truncate(path, length)
    return [""] * len(lengths)


def load_cost(paths: Sequence[Path], layout: PlannedLayout, ranks: int) -> Cost:
    """Returns the larger figures of the first rank and of the last, for a load of files."""
    return _planning_cost(partial(_prepare_load, paths), layout, ranks)


def save_cost(tensors: Sequence[TensorSpec], directory: Path, layout: PlannedLayout, ranks: int) -> Cost:
    """Returns the larger figures of the first rank and of the last, for a save of tensors as BF16."""
    return _planning_cost(partial(_prepare_save, tensors, directory), layout, ranks)


def _planning_cost(
    prepare: Callable[[PlannedLayout, DeviceMesh], Callable[[], object]], layout: PlannedLayout, ranks: int
) -> Cost:
    first, broadcasts, messages = _in_child(prepare, layout, 0, ranks, [], [])
    last, _, _ = _in_child(prepare, layout, ranks - 1, ranks, broadcasts, messages)
    return Cost(*map(max, first, last))


def _in_child(*arguments: Any) -> "tuple[Cost, list[bytes], list[bytes]]":
    """Returns the result of `_run_rank` in a process that has loaded nothing before."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(_run_rank, *arguments).result()


def _run_rank(
    prepare: Callable[[PlannedLayout, DeviceMesh], Callable[[], object]],
    layout: PlannedLayout,
    rank: int,
    ranks: int,
    broadcasts: list[bytes],
    messages: list[bytes],
) -> tuple[Cost, list[bytes], list[bytes]]:
    """Plans a load or a save as one rank. Returns its cost, and the broadcasts and messages of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    names = ("data", "model")
    shape = layout.mesh_shape(ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])
    call = prepare(layout, mesh)
    collectives = _Collectives(rank, ranks, list(broadcasts), list(messages))
    # Of what was imported. A collection takes a tenth of a second.
    gc.collect()
    memory, seconds = _peak_memory(), time.process_time()
    with (
        mock.patch.object(dist, "broadcast", collectives.broadcast),
        mock.patch.object(dist, "all_to_all_single", collectives.all_to_all_single),
        mock.patch.object(load, "agree_on_plan", _agree_on_plan),
        mock.patch.object(group_save, "Exchange", _NoExchange),
        mock.patch.object(CheckpointFiles, "create", _create_sparse),
        # The last rank opens the files.
        mock.patch.object(CheckpointFiles, "abandon"),
        contextlib.suppress(_Planned),
    ):
        call()
    seconds, memory = time.process_time() - seconds, _peak_memory() - memory
    cost = Cost(seconds, collectives.sent_bytes, collectives.received_bytes, memory)
    return cost, collectives.broadcasts, collectives.messages


def _peak_memory() -> int:
    """Returns the largest resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
