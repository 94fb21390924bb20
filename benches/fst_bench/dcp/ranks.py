"""One measurement by the ranks of a group, which are new processes: forks of this one, without the time of imports."""

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from .. import memory, page_cache
from ..checkpoint import Checkpoint
from ..fork_pool import fork_pool
from ..machine import field
from ..measure import cpu_seconds
from .layouts import shard, state_dict
from .methods import METHODS

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Job:
    """Measurement.

    Attributes:
        action, method: Names in `METHODS`.
        layout: Name in `LAYOUTS`.
        ranks: Number of ranks.
        state: State of the page cache: "warm" or "cold".
    """

    action: str
    method: str
    layout: str
    ranks: int
    state: str


def measure(job: Job, checkpoint: Checkpoint, is_checked: bool) -> dict[str, Any]:
    """Returns the figures of a group. It is done when its last rank is.

    If `is_checked`, `is_right` is whether all ranks have the tensors of the checkpoint.
    """
    pool = fork_pool(job.ranks)
    with tempfile.TemporaryDirectory() as folder, pool:
        futures = [pool.submit(_run, job, checkpoint, is_checked, rank, folder) for rank in range(job.ranks)]
        results = [future.result() for future in futures]
    sums = ("cpu_seconds", "read_bytes", "written_bytes")
    return {
        "seconds": max(rank["end"] for rank in results) - min(rank["begin"] for rank in results),
        **{key: sum(rank[key] for rank in results) for key in sums},
        "extra_bytes": max(rank["extra_bytes"] for rank in results),
        "is_right": all(rank["is_right"] for rank in results),
    }


def _run(job: Job, checkpoint: Checkpoint, is_checked: bool, rank: int, folder: str) -> dict[str, Any]:
    # For a rank that hangs where no timeout of the group applies.
    signal.alarm(2 * int(TIMEOUT.total_seconds()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # as torchrun does
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.ranks, timeout=TIMEOUT)
    try:
        return _measure(job, checkpoint, is_checked)
    finally:
        dist.destroy_process_group()


def _measure(job: Job, checkpoint: Checkpoint, is_checked: bool) -> dict[str, Any]:
    state: dict[str, Any] = dict(state_dict(checkpoint.workload.tensors, job.layout, job.ranks))
    if dist.get_rank() == 0:
        for path in checkpoint.paths:
            (page_cache.drop if job.state == "cold" else page_cache.warm)(path)
        if job.state == "cold":
            memory.claim(checkpoint.workload.size_bytes)
    memory.reset_peak()
    dist.barrier()
    before = _counters()
    begin = time.perf_counter()
    METHODS[job.action][job.method].run(state, str(checkpoint.paths[0].parent))
    end = time.perf_counter()
    figures = {key: now - before[key] for key, now in _counters().items()}
    # No rank compares while others still load.
    dist.barrier()
    return {"begin": begin, "end": end, **figures, "is_right": not is_checked or _holds(state, checkpoint.paths)}


def _counters() -> dict[str, float]:
    """Returns the increasing figures of this process."""
    return {
        "cpu_seconds": cpu_seconds(),
        "read_bytes": int(field("/proc/self/io", "read_bytes")),
        "written_bytes": int(field("/proc/self/io", "write_bytes")),
        "extra_bytes": memory.peak_bytes(),
    }


def _holds(state: dict[str, DTensor], paths: Sequence[Path]) -> bool:
    """Returns whether this rank has the bits of the checkpoint."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                expected, local = shard(file.get_tensor(name), state[name]), state[name].to_local()
                if not torch.equal(local.view(torch.int16), expected.contiguous().view(torch.int16)):
                    return False
    return True
