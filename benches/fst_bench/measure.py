"""Measurement of one job in a process of its own.

The clock starts after the library is imported, the page cache is in the requested state and
the device is initialized. It stops when every tensor has been returned, and again when every byte
has been read once. The digest that proves the result is computed after that.
"""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import memory, page_cache
from .device import Device
from .digest import digest
from .loaders.base import Job, Loader
from .meter import Meter, read_every_byte, start_threads
from .peer import PEERS
from .result import CPU_OF_GB


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measures a job on files, or converts files."""
    asked = Job.of(job)
    peer = PEERS[asked.peer]
    start = time.perf_counter()
    loader = peer.open()
    imported = {"version": peer.version(), "import_seconds": time.perf_counter() - start}
    if asked.action == "convert":
        return convert(asked, loader)
    return imported | (measure_save(asked, loader) if asked.action == "save" else measure_load(asked, loader))


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
    meter = Meter()
    loader.save(tensors, job.target)
    figures = meter.figures()
    return {
        "reader": "",
        "save_seconds": figures["seconds"],
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "beyond_host_bytes": figures["extra_bytes"],
        "digests": [digest(load_file(job.target))],
    }


def measure_load(job: Job, loader: Loader) -> dict[str, Any]:
    if job.action == "pretrained":
        importlib.import_module(".loaders.transformers", __package__)
    device = Device(job.device)
    start_threads(job.device)
    device.finish()
    size_bytes = job.size_bytes or set_page_cache(job.paths, job.state)
    # Enough for a copy of the files in the process, and for one in the page cache if it has none.
    memory.claim(size_bytes * ((job.device == "cpu") + (job.state == "cold")))

    device.begin()
    meter = Meter()
    loader.prepare(job)
    meter.start(keeps_peak=True)
    tensors = loader.run(job)
    device.finish()
    loaded = time.perf_counter()
    device_figures = device.figures(tensors)
    reading = time.perf_counter()
    read_every_byte(tensors)
    device.finish()
    read, figures = time.perf_counter() - reading, meter.figures()
    tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    result: dict[str, Any] = {
        "reader": loader.reader(job),
        "load_seconds": loaded - meter.begin,
        "load_and_read_seconds": loaded - meter.begin + read,
        CPU_OF_GB: figures["cpu_seconds"] / tensor_bytes * 1e9,
        "storage_bytes": figures["storage_bytes"],
        "tensor_bytes": tensor_bytes,
        "peak_host_bytes": figures["extra_bytes"],
        "beyond_host_bytes": figures["extra_bytes"] - (tensor_bytes if job.device == "cpu" else 0),
        **device_figures,
        "digests": [digest(tensors)],
    }
    if job.repeats:
        del tensors
        set_page_cache(job.paths, job.state)
        start = time.perf_counter()
        tensors = loader.run(job)
        device.finish()
        result["second_load_seconds"] = time.perf_counter() - start
        result["digests"].append(digest(tensors))
    return result


def set_page_cache(paths: Sequence[str | Path], state: str) -> int:
    """Drops files from the page cache if the state is cold, or reads them into it. Returns their size in bytes."""
    for path in map(Path, paths):
        (page_cache.drop if state == "cold" else page_cache.warm)(path)
    return sum(Path(path).stat().st_size for path in paths)
