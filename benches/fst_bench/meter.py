"""Time and resources of a measured call."""

import resource
import time

import torch
from torch import Tensor

from . import memory
from .machine import field


class Meter:
    """Time, CPU time, disk traffic and memory of this process since the last start."""

    def __init__(self) -> None:
        self.start()

    def start(self, *, keeps_peak: bool = False) -> None:
        """Starts again. With `keeps_peak`, memory is that since the start before."""
        if not keeps_peak:
            memory.reset_peak()
            self._peak_before = memory.peak_bytes()
        self._before = _counters()
        self.begin = time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Returns the differences to the start: seconds, and bytes of the disk and of the peak of resident memory."""
        end, after, peak = time.perf_counter(), _counters(), memory.peak_bytes()
        differences = {key: now - self._before[key] for key, now in after.items()}
        return {"seconds": end - self.begin, **differences, "extra_bytes": peak - self._peak_before}


def _counters() -> dict[str, float]:
    # The CPU time includes programs that this process has run, the bytes read include the page cache.
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "storage_bytes": int(field("/proc/self/io", "read_bytes")),
        "written_bytes": int(field("/proc/self/io", "write_bytes")),
    }


def read_every_byte(tensors: dict[str, Tensor]) -> None:
    """Sums each tensor as integers, of the widest type that its size and address allow."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1)
        item_bytes = tensor.element_size()
        wide = flat.numel() * item_bytes % 8 == 0 and tensor.storage_offset() * item_bytes % 8 == 0
        flat.view(torch.int64 if wide else integers[item_bytes]).sum()


def start_threads(device: str = "cpu") -> None:
    """Starts PyTorch's threads and, on a GPU, the context and the kernel of the sum."""
    read_every_byte({"": torch.ones(1 << 20, dtype=torch.bfloat16, device=device)})
