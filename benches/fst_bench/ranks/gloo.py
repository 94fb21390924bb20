"""Ceilings of collectives: gloo alone, with as many bytes as the files."""

import time
from collections.abc import Callable
from typing import Any

from .. import memory
from .task import Task


def broadcasts(task: Task) -> dict[str, Any]:
    """Runs an all-gather as concurrent broadcasts: each rank has one part of the bytes and receives all of them."""
    import torch
    import torch.distributed as dist

    part = torch.ones(_part_bytes(task), dtype=torch.uint8)
    gathered = torch.zeros(len(part) * task.ranks, dtype=torch.uint8)
    rows = gathered.view(task.ranks, -1)
    rows[dist.get_rank()].copy_(part)

    def run() -> None:
        works = [dist.broadcast(row, rank, async_op=True) for rank, row in enumerate(rows)]
        for work in works:
            work.wait()

    return _timed(run, len(part) * (task.ranks - 1))


def all_to_all(task: Task) -> dict[str, Any]:
    """Runs an all-to-all: each rank has one part of the bytes and sends a chunk of it to each rank."""
    import torch
    import torch.distributed as dist

    send = torch.ones(_part_bytes(task) // task.ranks * task.ranks, dtype=torch.uint8)
    receive = torch.zeros_like(send)
    return _timed(lambda: dist.all_to_all_single(receive, send), len(send) // task.ranks * (task.ranks - 1))


CEILINGS: dict[str, Callable[[Task], dict[str, Any]]] = {"broadcasts": broadcasts, "all-to-all": all_to_all}


def _part_bytes(task: Task) -> int:
    memory.claim(task.size_bytes)
    return task.size_bytes // task.ranks


def _timed(collective: Callable[[], object], received_bytes: int) -> dict[str, Any]:
    import torch.distributed as dist

    collective()
    dist.barrier()
    begin = time.perf_counter()
    collective()
    return {"begin": begin, "end": time.perf_counter(), "received_bytes": received_bytes}
