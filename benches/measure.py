"""One measurement, in a process of its own: a job comes as an argument, its result goes to stdout.

The clock starts when the library is imported, the page cache is in the state asked for and
the device is awake; it stops when every tensor is there, and again when every byte of them
has been read once. The digest that proves the result is taken after that.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import page_cache
from digest import digest
from loader import UnsupportedError
from peer import PEERS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Job:
    """What to measure; with `names` only these tensors are loaded."""

    peer: str
    state: str
    device: str
    path: str
    names: tuple[str, ...] = ()


def measure(job: Job) -> dict[str, Any]:
    import torch

    peer = PEERS[job.peer]
    loader = peer.open()
    on_cuda = job.device.startswith("cuda")

    def finish() -> None:
        if on_cuda:
            torch.cuda.synchronize(job.device)

    # Starts PyTorch's threads and, on a GPU, the context and the kernel of the sum.
    read_every_byte({"": torch.ones(1 << 20, dtype=torch.bfloat16, device=job.device)})
    finish()
    path = Path(job.path)
    prepare(job.state, path)
    cached_bytes = page_cache.resident_bytes(path)
    # Enough for a copy of the file in the process, and for one in the page cache if that has none.
    memory.claim(path.stat().st_size * (2 if job.state == "cold" else 1))
    device_free_before = torch.cuda.mem_get_info(job.device)[0] if on_cuda else 0

    memory.reset_peak()
    peak_before, private_before = memory.peak_bytes(), memory.private_bytes()
    usage_before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    tensors = loader.select(job.path, job.names, job.device) if job.names else loader.load(job.path, job.device)
    finish()
    loaded = time.perf_counter()
    read_every_byte(tensors)
    finish()
    read = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak, private = memory.peak_bytes(), memory.private_bytes()
    device_free = torch.cuda.mem_get_info(job.device)[0] if on_cuda else 0

    return {
        "version": peer.version(),
        "reader": loader.reader(job.path, job.device),
        "load_seconds": loaded - start,
        "load_and_read_seconds": read - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime,
        "page_faults": usage.ru_minflt + usage.ru_majflt - usage_before.ru_minflt - usage_before.ru_majflt,
        "cached_bytes_before": cached_bytes,
        "peak_host_bytes": peak - peak_before,
        "private_host_bytes": private - private_before,
        "device_bytes": device_free_before - device_free,
        "digest": digest(tensors),
    }


def prepare(state: str, path: Path) -> None:
    if state == "cold":
        page_cache.drop(path)
    else:
        page_cache.warm(path)


def read_every_byte(tensors: "dict[str, Tensor]") -> None:
    """Sums each tensor as integers, as wide as its size and place allow."""
    import torch

    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    for tensor in tensors.values():
        flat = tensor.reshape(-1)
        item_bytes = tensor.element_size()
        wide = flat.numel() * item_bytes % 8 == 0 and tensor.storage_offset() * item_bytes % 8 == 0
        flat.view(torch.int64 if wide else integers[item_bytes]).sum()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[int]:
    """Keeps what libraries print out of the result; yields a descriptor of the real stdout."""
    real = os.dup(1)
    os.dup2(2, 1)
    yield real
    os.close(real)


def main() -> None:
    with stdout_to_stderr() as real:
        job = json.loads(sys.argv[1])
        try:
            result = measure(Job(**job | {"names": tuple(job["names"])}))
        except (ImportError, UnsupportedError) as reason:
            result = {"unavailable": str(reason)}
        os.write(real, json.dumps(result).encode())


if __name__ == "__main__":
    main()
