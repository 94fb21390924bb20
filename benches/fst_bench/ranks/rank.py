"""Load by one rank of a group, with its times and memory."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import memory, page_cache
from ..digest import digest
from ..loaders.base import Loader
from ..measure import read_every_byte, storage_bytes

LINK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Task:
    """Load of these files by a number of ranks, each tensor sharded in the given dimension or replicated.

    With the state `remote`, the paths are URLs. `size_bytes` is that of all files.
    """

    ranks: int
    state: str
    paths: list[str]
    size_bytes: int
    dims: dict[str, int | None]


def load(task: Task, loader: Loader) -> dict[str, Any]:
    """Loads together with the other ranks. Times are of a clock that all processes share."""
    loader.prepare_sharded()
    read_every_byte({"": torch.ones(1 << 20, dtype=torch.bfloat16)})
    if dist.get_rank() == 0 and task.state != "remote":
        for path in map(Path, task.paths):
            (page_cache.drop if task.state == "cold" else page_cache.warm)(path)
    # Enough for a copy of all files: no layout keeps more.
    memory.claim(task.size_bytes)
    memory.reset_peak()
    peak_before, storage_before = memory.peak_bytes(), storage_bytes()
    dist.barrier()
    link_before = int(LINK_COUNTER.read_text())
    dist.barrier()
    begin = time.perf_counter()
    tensors = loader.sharded(task.paths, task.dims, "cpu")
    loaded = time.perf_counter()
    dist.barrier()
    link = int(LINK_COUNTER.read_text()) - link_before
    # No rank reads every byte while others still load.
    reading = time.perf_counter()
    read_every_byte(tensors)
    read = time.perf_counter()
    tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "begin": begin,
        "loaded": loaded,
        "reading": reading,
        "read": read,
        "storage_bytes": storage_bytes() - storage_before,
        "link_bytes": link,
        "beyond_host_bytes": memory.peak_bytes() - peak_before - tensor_bytes,
        "digest": digest(tensors),
    }
