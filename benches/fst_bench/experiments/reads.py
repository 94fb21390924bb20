"""Reads from the page cache without a GPU, and starts of threads."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from .context import MIB, Context, Rows, on_threads, row, seconds

SLOT_BYTES = 4 * MIB
# As large as a part of a slot may be, so that Python's lock is taken rarely.
PART_BYTES = 2 * MIB
THREADS = (1, 8, 16)
# Slots of a load whose workers share them, of one worker each, and as many as have the bytes of 32 slots of 8 MiB: the
# first ones fit an L3 cache.
SLOTS = (5, 32, 64)
ROUNDS = 3


def reads(context: Context) -> Rows:
    """Times reads of a file in the page cache into slots, by threads, slots and pages, and their CPU time."""
    with _file(context) as file:
        size = os.fstat(file).st_size
        for threads in THREADS:
            for slots in SLOTS[: context.repeats]:
                for huge in (False, True):
                    with _slots(slots, huge) as memory:
                        times, cpu = [], []
                        for _ in range(ROUNDS):
                            begin = time.process_time()
                            times.append(size / seconds(partial(_read, file, size, memory, threads)) / 1e9)
                            cpu.append((time.process_time() - begin) / size * 1e9)
                    pages = "huge" if huge else "4 KiB"
                    what = f"{threads} threads, {slots} slots, {pages} pages"
                    is_usual = slots == SLOTS[0] and not huge
                    parameter = {1: "reader_gbps", 16: "readers_gbps"}.get(threads, "") if is_usual else ""
                    yield row(f"reads by {what}", times, "GB/s", parameter)
                    yield row(f"CPU time of a GB by {what}", cpu, "s")


def starts(context: Context) -> Rows:
    """Times the start of 15 threads, and a sleep of 50 us."""

    def start() -> None:
        threads = [threading.Thread(target=lambda: None) for _ in range(15)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    repeats = 4 * context.repeats
    times = [seconds(start) * 1e6 / 15 for _ in range(repeats)]
    yield row("start and end of a thread, with Python's part", times, "us", "thread_us")
    times = [seconds(lambda: time.sleep(50e-6)) * 1e6 for _ in range(repeats)]
    yield row("sleep of 50 us", times, "us")


@contextmanager
def _file(context: Context) -> Iterator[int]:
    """Writes a file, and yields a descriptor of it."""
    context.files.mkdir(parents=True, exist_ok=True)
    path = context.files / "reads"
    write(path, context.total_bytes)
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)
        path.unlink()


@contextmanager
def _slots(count: int, huge: bool) -> Iterator[memoryview]:
    with mmap.mmap(-1, count * SLOT_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        view = memoryview(memory)
        view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)
        try:
            yield view
        finally:
            view.release()


def _read(file: int, size: int, memory: memoryview, threads: int) -> None:
    lock, parts = threading.Lock(), iter(range(0, size, PART_BYTES))

    def work() -> None:
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            place = part % len(memory)
            os.preadv(file, [memory[place : place + PART_BYTES]], part)

    on_threads(threads, work)


def write(path: Path, size: int, head: bytes = b"") -> None:
    """Writes `head` and then `size` bytes of weights to a file, which then is in the page cache. Waits for no disk."""
    # The highest bit of no exponent is set, so that no value is NaN or infinite.
    block = bytes(byte & 0xBF for byte in os.urandom(64 << 10)) * 256
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        left = memoryview(head)
        while left:
            left = left[os.write(file, left) :]
        while size > 0:
            size -= os.write(file, memoryview(block)[:size])
    finally:
        os.close(file)
