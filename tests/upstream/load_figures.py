"""Figures of loads in a process: bytes read, CPU time, growth of memory, and the pages that a load needs."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = 4096


class LoadedError(Exception):
    """Ends a load before the server processes the weights, for which its build for CPUs may lack kernels."""


def digest(tensor: Any) -> str:
    """Returns a digest of the values of a tensor."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        tensor = tensor.dequantize()
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Meter:
    """What this process reads and uses between two points."""

    def begin(self) -> None:
        self._is_running, self._peak, self._anonymous = True, 0, _anonymous_kib()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def end(self) -> dict[str, float]:
        """Returns CPU time and time in seconds, and by how much anonymous memory has grown at most, in MiB."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self._is_running = False
        self._thread.join()
        self._peak = max(self._peak, _anonymous_kib())
        return {"cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "anonymous_mib": (self._peak - self._anonymous) >> 10}

    def _sample(self) -> None:
        while self._is_running:
            self._peak = max(self._peak, _anonymous_kib())
            time.sleep(0.005)


def _anonymous_kib() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1])


def bytes_read() -> tuple[int, int]:
    """Returns the number of bytes that system calls of this process have read, and that storage has read for it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    values = dict(line.split(": ") for line in lines)
    return int(values["rchar"]), int(values["read_bytes"])


def drop_pages(folder: Path) -> None:
    """Removes the weights of a model from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def needed_pages(recording: Any) -> int:
    """Returns the number of pages of files that have a byte of what a recording keeps.

    No load of files can read less from a disk. A part of a tensor that is a copy of others counts as all of them.
    """
    import numpy as np

    pages: dict[str, Any] = {}
    for write in recording._log.writes():
        if write.source is None:
            continue
        for path, first, last in _spans(*write.source):
            # +1 where pages begin to be used, and -1 behind them.
            if path not in pages:
                pages[path] = np.zeros(Path(path).stat().st_size // PAGE + 2, dtype=np.int64)
            np.add.at(pages[path], first // PAGE, 1)
            np.add.at(pages[path], last // PAGE + 1, -1)
    return sum(int(np.count_nonzero(np.cumsum(changes))) for changes in pages.values())


def _spans(meta: Any, base: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields paths, with arrays of the first and the last bytes of the parts that a view has."""
    import numpy as np

    if hasattr(base, "inputs"):
        for view in base.inputs:
            yield from _spans(*view)
        return
    if not meta.numel():
        return
    dims = sorted(zip(meta.stride(), meta.shape, strict=True))
    length = 1
    while dims and dims[0][0] <= length:
        stride, size = dims.pop(0)
        length = max(length, stride * (size - 1) + length)
    offsets = np.array([meta.storage_offset()])
    for stride, size in dims:
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    info = base.checkpoint.tensor_info(base.name)
    first = info.begin + offsets * meta.element_size()
    yield base.checkpoint.path(base.name), first, first + length * meta.element_size() - 1
