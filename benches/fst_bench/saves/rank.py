"""Ranks that save: new processes of a group, which run one method after the other."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from .. import memory
from ..fork_pool import fork_pool
from ..machine import field
from ..measure import cpu_seconds, storage_bytes
from ..workload import TensorSpec, Workload
from .methods import METHODS, State
from .state import full_tensor, make_mesh, make_state

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """Saves of one state dict.

    Attributes:
        workload: The tensors.
        layout: Name in `LAYOUTS`.
        ranks: Number of ranks.
        methods: Names in `METHODS`, in the order of the measurements.
        folder: Existing folder on the disk to measure.
    """

    workload: Workload
    layout: str
    ranks: int
    methods: Sequence[str]
    folder: Path


def run(task: Task) -> dict[str, dict[str, float]]:
    """Runs the methods on new processes, and returns the figures of each.

    Raises:
        RuntimeError: A method wrote wrong tensors.
    """
    with tempfile.TemporaryDirectory() as store, fork_pool(task.ranks) as pool:
        ranks = list(pool.map(_measure_all, [task] * task.ranks, range(task.ranks), [store] * task.ranks))
    return {method: _joined([rank[method] for rank in ranks]) for method in task.methods}


def _joined(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the figures of a group, which is done when its last rank is."""
    begin = min(rank["begin"] for rank in ranks)
    return {
        "pause_seconds": max(rank["returned"] for rank in ranks) - begin,
        "seconds": max(rank["saved"] for rank in ranks) - begin,
        "durable_seconds": max(rank["durable"] for rank in ranks) - begin,
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "written_bytes": sum(rank["written_bytes"] for rank in ranks),
        "storage_bytes": sum(rank["storage_bytes"] for rank in ranks),
        "extra_bytes": max(rank["extra_bytes"] for rank in ranks),
    }


def _measure_all(task: Task, rank: int, store: str) -> dict[str, dict[str, float]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # as torchrun does
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=task.ranks, timeout=TIMEOUT
    )
    try:
        state = make_state(task.workload, task.layout, make_mesh(task.layout, task.ranks))
        return {method: _measure(task, method, state) for method in task.methods}
    finally:
        dist.destroy_process_group()


def _measure(task: Task, name: str, state: State) -> dict[str, float]:
    method, directory = METHODS[name], task.folder / "saved"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        # The measurement must not wait for dirty pages of other saves.
        os.sync()
    dist.barrier()
    memory.reset_peak()
    before = memory.peak_bytes(), cpu_seconds(), storage_bytes(), _written_bytes()
    dist.barrier()
    begin = time.perf_counter()
    wait = method.save(state, directory)
    returned = time.perf_counter()
    if wait is not None:
        wait()
    saved = time.perf_counter()
    dist.barrier()
    if is_first:
        _flush(directory)
    durable = time.perf_counter()
    after = memory.peak_bytes(), cpu_seconds(), storage_bytes(), _written_bytes()
    extra, cpu, storage, written = (now - then for now, then in zip(after, before, strict=True))
    if is_first and method.is_plain:
        _check(task.workload.tensors, directory)
    dist.barrier()
    return {
        "begin": begin,
        "returned": returned,
        "saved": saved,
        "durable": durable if is_first else saved,
        "cpu_seconds": cpu,
        "storage_bytes": storage,
        "written_bytes": written,
        "extra_bytes": max(0, extra),
    }


def _written_bytes() -> int:
    """Returns the bytes that this process has caused to be written to a disk, including pages still in the cache."""
    return int(field("/proc/self/io", "write_bytes"))


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _check(tensors: Sequence[TensorSpec], directory: Path) -> None:
    saved = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for tensor in tensors:
        if not torch.equal(saved.pop(tensor.name), full_tensor(tensor)):
            raise RuntimeError(f'{directory}: tensor "{tensor.name}" has wrong values')
