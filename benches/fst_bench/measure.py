"""One measurement in a separate process: the job is an argument, the result goes to stdout.

The clock starts after the library is imported, the page cache is in the requested state and
the device is initialized. It stops when every tensor has been returned, and again when every byte
has been read once. The digest that proves the result is computed after that.
"""

import importlib
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import memory, page_cache
from .child import print_result
from .device import Device
from .digest import digest
from .loaders.base import Loader
from .machine import field
from .peer import PEERS
from .result import CPU_OF_GB
from .workload import Slice


@dataclass(frozen=True)
class Job:
    """Job of a measurement: an action on these files, for some actions restricted to `names` or `slices`.

    The action `convert` writes the files again in the peer's own format. A save goes to `target`. With `repeats`, the
    action runs twice in the process; the second is `second_load_seconds`.
    URLs in place of paths have a size together, `remote_bytes`, and no page cache.
    """

    peer: str
    action: str
    state: str
    device: str
    paths: tuple[str, ...]
    names: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    repeats: bool = False
    target: str = ""
    remote_bytes: int = 0

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        slices = tuple(Slice(**cut) for cut in fields["slices"])
        return cls(**fields | {"paths": tuple(fields["paths"]), "names": tuple(fields["names"]), "slices": slices})

    def run(self, loader: Loader) -> dict[str, Tensor]:
        if self.action == "cast":
            return loader.cast(self.paths, torch.float16, self.device)
        if self.action == "slice":
            return loader.slice(self.paths, self.slices, self.device)
        if self.action == "select":
            return loader.select(self.paths, self.names, self.device)
        if self.action == "columns":
            return loader.columns(self.paths, self.slices, self.device)
        if self.action == "pretrained":
            return loader.pretrained(str(Path(self.paths[0]).parent), self.device)
        return loader.load(self.paths, self.device)


def measure(job: Job) -> dict[str, Any]:
    peer = PEERS[job.peer]
    start = time.perf_counter()
    loader = peer.open()
    imported = {"version": peer.version(), "import_seconds": time.perf_counter() - start}
    if job.action == "convert":
        return convert(job, loader)
    return imported | (measure_save(job, loader) if job.action == "save" else measure_load(job, loader))


def convert(job: Job, loader: Loader) -> dict[str, Any]:
    """Converts the files that were not converted before."""
    for path in map(Path, job.paths):
        target = path.with_suffix(PEERS[job.peer].suffix)
        if not target.exists():
            loader.convert(str(path), str(target))
    return {}


def measure_save(job: Job, loader: Loader) -> dict[str, Any]:
    from safetensors.torch import load_file

    device = Device(job.device)
    tensors = {
        name: tensor.clone() for path in job.paths for name, tensor in load_file(path, device=job.device).items()
    }
    # The measurement must not wait for dirty pages of other processes.
    os.sync()
    device.finish()
    memory.reset_peak()
    peak_before = memory.peak_bytes()
    start = time.perf_counter()
    loader.save(tensors, job.target)
    seconds = time.perf_counter() - start
    peak = memory.peak_bytes()
    return {
        "reader": "",
        "save_seconds": seconds,
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "beyond_host_bytes": peak - peak_before,
        "digests": [digest(load_file(job.target))],
    }


def measure_load(job: Job, loader: Loader) -> dict[str, Any]:
    if job.action == "pretrained":
        importlib.import_module(".loaders.transformers", __package__)
    device = Device(job.device)
    # Starts PyTorch's threads and, on a GPU, the context and the kernel of the sum.
    read_every_byte({"": torch.ones(1 << 20, dtype=torch.bfloat16, device=job.device)})
    device.finish()
    size_bytes = prepare(job)
    # Enough for a copy of the files in the process, and for one in the page cache if it has none.
    memory.claim(size_bytes * ((job.device == "cpu") + (job.state == "cold")))

    device.begin()
    memory.reset_peak()
    peak_before = memory.peak_bytes()
    loader.prepare_load(job.paths, job.device)
    cpu_before, storage_before = cpu_seconds(), storage_bytes()
    start = time.perf_counter()
    tensors = job.run(loader)
    device.finish()
    loaded = time.perf_counter()
    device_figures = device.figures(tensors)
    reading = time.perf_counter()
    read_every_byte(tensors)
    device.finish()
    read = time.perf_counter()
    cpu, from_storage, peak = cpu_seconds() - cpu_before, storage_bytes() - storage_before, memory.peak_bytes()
    tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    digests = [digest(tensors)]
    result: dict[str, Any] = {
        "reader": loader.reader(job.paths, job.device),
        "load_seconds": loaded - start,
        "load_and_read_seconds": loaded - start + read - reading,
        CPU_OF_GB: cpu / tensor_bytes * 1e9,
        "storage_bytes": from_storage,
        "tensor_bytes": tensor_bytes,
        "peak_host_bytes": peak - peak_before,
        "beyond_host_bytes": peak - peak_before - (tensor_bytes if job.device == "cpu" else 0),
        **device_figures,
        "digests": digests,
    }
    if job.repeats:
        del tensors
        prepare(job)
        start = time.perf_counter()
        tensors = job.run(loader)
        device.finish()
        result["second_load_seconds"] = time.perf_counter() - start
        digests.append(digest(tensors))
    return result


def storage_bytes() -> int:
    """Returns the bytes that this process has caused the disk to read so far, page cache included."""
    return int(field("/proc/self/io", "read_bytes"))


def cpu_seconds() -> float:
    """Returns the CPU time of this process so far, and of the programs that it has run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def prepare(job: Job) -> int:
    """Puts the page cache into the job's state. Returns the size of the files in bytes."""
    if job.remote_bytes:
        return job.remote_bytes
    change = page_cache.drop if job.state == "cold" else page_cache.warm
    for path in map(Path, job.paths):
        change(path)
    return sum(Path(path).stat().st_size for path in job.paths)


def read_every_byte(tensors: dict[str, Tensor]) -> None:
    """Sums each tensor as integers, of the widest type that its size and address allow."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1)
        item_bytes = tensor.element_size()
        wide = flat.numel() * item_bytes % 8 == 0 and tensor.storage_offset() * item_bytes % 8 == 0
        flat.view(torch.int64 if wide else integers[item_bytes]).sum()


if __name__ == "__main__":
    print_result(lambda: measure(Job.from_json(sys.argv[1])))
