"""Ceilings of the hardware: each rate is measured in a separate process, in the same run."""

import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from . import memory, page_cache
from .unsupported import UnsupportedError

BLOCK_BYTES = 4 << 20
DIRECT_THREADS = 8
DIRECT_VARIANTS = ((4, 16 << 20), (8, 4 << 20), (16, 4 << 20), (32, 1 << 20))  # threads, bytes of a block
DIRECT_REPEATS = 3
COPY_BYTES = 1 << 30
# Names of the ceilings of loads from a cold page cache, into other memory and of a mapped file, and of the read beside
# each of them.
DISK = "direct-reads"
READ_AHEAD = "read-ahead"
RAW_READ = "raw-read"
READ_AHEAD_THREADS = 4
REPEATS = 5


def direct(path: Path, device: str) -> dict[str, Any]:
    """Measures the best rate of direct reads of the whole file into a few reused buffers."""
    repeated = DIRECT_VARIANTS * DIRECT_REPEATS
    best, threads, block = max((_read_rate(path, *variant), *variant) for variant in repeated)
    variants = ", ".join(f"{threads} x {block >> 20} MiB" for threads, block in DIRECT_VARIANTS)
    return _rate(best, f"O_DIRECT, best of {DIRECT_REPEATS} reads each by {variants}: {threads} x {block >> 20} MiB")


def read_ahead(path: Path, device: str) -> dict[str, Any]:
    """Measures a read of every byte of a mapped file, which other threads request from a cold page cache."""
    import torch

    size = path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES
    page_cache.drop(path)
    memory.claim(2 * size)
    with path.open("rb") as file:
        blocks = iter(range(0, size, BLOCK_BYTES))

        def worker() -> None:
            for offset in blocks:
                os.posix_fadvise(file.fileno(), offset, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)

        start = time.perf_counter()
        mapped = torch.from_file(str(path), shared=True, size=size // 8, dtype=torch.int64)
        with ThreadPoolExecutor(READ_AHEAD_THREADS) as pool:
            requests = [pool.submit(worker) for _ in range(READ_AHEAD_THREADS)]
            # In the order of the file. The threads of one sum of all would read different parts.
            for block in mapped.split(BLOCK_BYTES // 8):
                block.sum()
            seconds = time.perf_counter() - start
            for request in requests:
                request.result()
    return _rate(size / seconds, f"posix_fadvise, {READ_AHEAD_THREADS} threads, {BLOCK_BYTES >> 20} MiB, and torch sum")


def raw_read(path: Path, device: str) -> dict[str, Any]:
    """Measures one direct read of the whole file, to compare with a load at the same time."""
    how = f"{DIRECT_THREADS} threads, O_DIRECT, {BLOCK_BYTES >> 20} MiB blocks"
    return _rate(_read_rate(path, DIRECT_THREADS, BLOCK_BYTES), how)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        raise UnsupportedError(f"O_DIRECT: {error.strerror}") from error


def direct_writes(path: Path, device: str) -> dict[str, Any]:
    """Measures direct writes of a new file of the same size, allocated before the clock starts."""
    target = path.with_suffix(".written")
    size = path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES
    descriptor = _open_direct(target, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, size)
        blocks = iter(range(0, size, BLOCK_BYTES))

        def worker() -> int:
            buffer = mmap.mmap(-1, BLOCK_BYTES)
            buffer.write(os.urandom(BLOCK_BYTES))
            return sum(os.pwritev(descriptor, [buffer], offset) for offset in blocks)

        rate = shared_rate(worker, size, DIRECT_THREADS, lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)
        target.unlink()
    return _rate(rate, f"{DIRECT_THREADS} threads, O_DIRECT, {BLOCK_BYTES >> 20} MiB blocks, flushed")


def _read_rate(path: Path, threads: int, block_bytes: int) -> float:
    descriptor, size = _open_direct(path, os.O_RDONLY), path.stat().st_size
    blocks = iter(range(0, size, block_bytes))

    def worker() -> int:
        buffer = mmap.mmap(-1, block_bytes)  # page-aligned, as O_DIRECT requires
        return sum(os.preadv(descriptor, [buffer], offset) for offset in blocks)

    return shared_rate(worker, size, threads)


def shared_rate(
    worker: Callable[[], int], size: int, threads: int, finish: Callable[[], object] = lambda: None
) -> float:
    """Returns the rate at which this number of threads together move `size` bytes."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        done = sum(future.result() for future in [pool.submit(worker) for _ in range(threads)])
        finish()
        seconds = time.perf_counter() - start
    assert done == size, f"moved {done} of {size} bytes"
    return size / seconds


def memory_read(path: Path, device: str) -> dict[str, Any]:
    """Measures the sum that reads every byte of a load, over memory that is already resident."""
    import torch

    values = torch.ones(COPY_BYTES // 8, dtype=torch.int64)
    return _rate(_best_rate(COPY_BYTES, lambda: values.sum()), f"torch sum, {torch.get_num_threads()} threads")


def pinned_to_device(path: Path, device: str) -> dict[str, Any]:
    import torch

    source = torch.ones(COPY_BYTES // 8, dtype=torch.int64).pin_memory()
    destination = torch.empty_like(source, device=device)

    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return _rate(_best_rate(COPY_BYTES, copy), "1 GiB of pinned host memory")


def _best_rate(size: int, work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds)


def _rate(bytes_per_second: float, how: str) -> dict[str, Any]:
    return {"bytes_per_second": bytes_per_second, "how": how}


def openssl(algorithm: str, path: Path, device: str) -> dict[str, Any]:
    """Measures an algorithm of OpenSSL on one core."""
    if shutil.which("openssl") is None:
        raise UnsupportedError("openssl is not installed")
    command = ["openssl", "speed", "-mr", "-seconds", "1", "-bytes", str(1 << 20), "-evp", algorithm]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # "+F:22:AES-256-GCM:3041234567.89"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("+F:")]
    return _rate(float(line.rpartition(":")[2]), "openssl speed, one core, 1 MiB blocks")


CEILINGS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    DISK: direct,
    READ_AHEAD: read_ahead,
    RAW_READ: raw_read,
    "direct-writes": direct_writes,
    "memory-read": memory_read,
    "aes-256-gcm": partial(openssl, "aes-256-gcm"),
    "sha256": partial(openssl, "sha256"),
    "pinned-to-device": pinned_to_device,
}


def ceilings_of(device: str) -> list[str]:
    """Returns the ceilings that can limit a load to this device. A raw read is measured beside each cold load."""
    others = (RAW_READ, "pinned-to-device") if device == "cpu" else (RAW_READ, READ_AHEAD)
    return [name for name in CEILINGS if name not in others]


def measure(name: str, path: str, device: str) -> dict[str, Any]:
    """Returns the rate of a ceiling, of which `path` is a large file on the disk in question."""
    return CEILINGS[name](Path(path), device)
