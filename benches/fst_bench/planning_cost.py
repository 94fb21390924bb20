"""Cost of opening and planning a load or a save, for one rank of a large group that is simulated in one process.

The rank runs `fst.load_distributed` or `fst.save_distributed` until all ranks have agreed on the plan. Collectives
count bytes instead of moving them: every rank of the group sends the same messages, and this is checked for the first
rank and the last of a load. The first rank of a save would create the files, so only the last one is simulated.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fst

from . import memory
from .large_models import BY_COLUMNS, BY_ROWS, NODE_RANKS
from .layout import dtensor
from .workload import TensorSpec

# Forks of a process without threads.
_CONTEXT = get_context("forkserver")


# CPU seconds of one rank until all ranks have agreed on the plan, bytes that collectives take from this rank and give
# it from others, and growth of its largest resident memory.
Cost = dict[str, float]


class PlannedLayout(NamedTuple):
    """Layout of all tensors over a mesh of all ranks, or of nodes and their ranks."""

    title: str
    has_nodes: bool
    # Placement of all tensors, or a function that returns them for a name and a shape.
    placements: Any

    def mesh(self, ranks: int) -> DeviceMesh:
        if self.has_nodes:
            return init_device_mesh("cpu", (ranks // NODE_RANKS, NODE_RANKS), mesh_dim_names=("data", "model"))
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))


def _with_tensor_parallel(name: str, shape: torch.Size) -> Sequence[Any]:
    """Places tensors as `parallelize_module` and `fully_shard` do together."""
    module = name.split(".")[-2]
    if module in BY_ROWS:
        return [_StridedShard(0, split_factor=NODE_RANKS), Shard(0)]
    return [Shard(0), Shard(1) if module in BY_COLUMNS else Replicate()]


PLANNED = (
    PlannedLayout("FSDP", False, Shard(0)),
    PlannedLayout("FSDP + tensor-parallel in each node", True, _with_tensor_parallel),
)


# Messages of all ranks until they have agreed on the plan: their requests or tensors, and the digests of their plans.
_MESSAGES = 2


class _Planned(BaseException):
    """Ends a load or a save whose plan all ranks have agreed on."""


@dataclass
class _Collectives:
    """Collectives of one rank, of which all others send what it does.

    Attributes:
        rank, ranks: This rank, and the number of ranks.
        broadcasts: Data of broadcasts: those that rank 0 has sent, or will receive from it.
        sent: Messages of this rank to all.
    """

    rank: int
    ranks: int
    broadcasts: list[bytes]
    sent: list[bytes] = field(default_factory=list)
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
        own = data.view(self.ranks, -1)[0]
        self.sent.append(own.numpy().tobytes())
        self.sent_bytes += data.nbytes - own.nbytes
        self.received_bytes += data.nbytes - own.nbytes
        if len(self.sent) == _MESSAGES:
            raise _Planned
        return mock.Mock()


def load_cost(paths: Sequence[Path], layout: PlannedLayout, ranks: int) -> Cost:
    """Returns the larger figures of the first rank and of the last, for a load of files."""
    prepare = partial(_prepare_load, paths)
    first, broadcasts, sent = _in_child(prepare, layout, 0, ranks, [])
    last, _, others = _in_child(prepare, layout, ranks - 1, ranks, broadcasts)
    if sent != others:
        raise ValueError("the first rank and the last send different messages")
    return {key: max(value, last[key]) for key, value in first.items()}


def save_cost(tensors: Sequence[TensorSpec], layout: PlannedLayout, ranks: int) -> Cost:
    """Returns the figures of the last rank, for a save of tensors."""
    cost, _, _ = _in_child(partial(_prepare_save, tensors), layout, ranks - 1, ranks, [])
    return cost


def _prepare_load(paths: Sequence[Path], layout: PlannedLayout, mesh: DeviceMesh) -> Callable[[], object]:
    """Returns a load of the files."""
    # Loads to a GPU do not map files either.
    os.environ["FST_READER"] = "pread"
    return partial(fst.load_distributed, list(map(str, paths)), mesh, layout.placements)


def _prepare_save(tensors: Sequence[TensorSpec], layout: PlannedLayout, mesh: DeviceMesh) -> Callable[[], object]:
    """Returns a save of the tensors, to a directory that it does not reach."""
    state_dict = {}
    for spec in tensors:
        shape = torch.Size(spec.shape)
        placements = layout.placements(spec.name, shape) if callable(layout.placements) else [layout.placements]
        # No memory is touched.
        state_dict[spec.name] = dtensor(spec, mesh, placements, torch.empty)
    return partial(fst.save_distributed, state_dict, "planned")


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
) -> tuple[Cost, list[bytes], list[bytes]]:
    """Plans as one rank. Returns its cost, the broadcasts of rank 0, and the messages of this rank to all."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    call = prepare(layout, layout.mesh(ranks))
    collectives = _Collectives(rank, ranks, list(broadcasts))
    # Of what was imported. A collection takes a tenth of a second.
    gc.collect()
    memory.reset_peak()
    peak, seconds = memory.peak_bytes(), time.process_time()
    with (
        mock.patch.object(dist, "broadcast", collectives.broadcast),
        mock.patch.object(dist, "all_to_all_single", collectives.all_to_all_single),
        contextlib.suppress(_Planned),
    ):
        call()
    seconds, peak = time.process_time() - seconds, memory.peak_bytes() - peak
    cost = {
        "cpu_seconds": seconds,
        "sent_bytes": collectives.sent_bytes,
        "received_bytes": collectives.received_bytes,
        "memory_bytes": peak,
    }
    return cost, collectives.broadcasts, collectives.sent
