"""Registration and allocation of memory, and what the driver makes once."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from .context import KIB, MIB, Context, Rows, on_threads, row, seconds
from .driver import BLOCKING, UNTIMED, Copy, Driver, DriverError, host_memory, touch

PAGES_PER_MIB = 256
# A tensor of a mixture of experts of 2 GiB.
SMALL_TENSOR_BYTES = 113 * KIB
THREADS = 16
# A module without code that any GPU since Volta takes.
PTX = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n\0"


def registration(context: Context) -> Rows:
    """Times the registration of memory by size, kind of pages, and whether the pages exist."""
    driver = context.driver
    fixed: dict[tuple[bool, bool], dict[int, list[float]]] = {}
    for huge in (False, True):
        for touched in (False, True):
            for size in (MIB, 4 * MIB, 16 * MIB):
                times = [_register(driver, size, huge, touched) * 1e6 for _ in range(context.repeats)]
                fixed.setdefault((huge, touched), {})[size] = times
                pages = f"{'huge' if huge else '4 KiB'} pages{', which exist' if touched else ''}"
                yield row(f"registration of {size // MIB} MiB, {pages}", times, "us")
    present, absent = fixed[False, True], fixed[False, False]
    page_us = [
        (large - small) / (15 * PAGES_PER_MIB) for small, large in zip(present[MIB], present[16 * MIB], strict=True)
    ]
    yield row("registration of a page of 4 KiB that exists", page_us, "us", "pin_page_us")
    calls = [small - page * PAGES_PER_MIB for small, page in zip(present[MIB], page_us, strict=True)]
    yield row("registration, beyond its pages", calls, "us", "pin_us")
    made = [(new - old) / (16 * PAGES_PER_MIB) for new, old in zip(absent[16 * MIB], present[16 * MIB], strict=True)]
    yield row("page of 4 KiB that does not exist, beyond its registration", made, "us", "page_us")
    for threads in (1, THREADS):
        times = [_register_all(driver, threads, 2 * THREADS) * 1e3 for _ in range(context.repeats)]
        yield row(f"registration of {2 * THREADS} slots of 4 MiB by {threads} threads", times, "ms")
    yield row("longest call that queues a copy beside them", _stalls(driver, context), "us")


def _register(driver: Driver, size: int, huge: bool, touched: bool) -> float:
    with host_memory(size, huge) as host, ExitStack() as stack:
        if touched:
            touch(host, size)
        return seconds(lambda: stack.enter_context(driver.pinned(host, size)))


def _register_all(driver: Driver, threads: int, slots: int) -> float:
    size = 4 * MIB
    driver.bind()
    with ExitStack() as stack:
        hosts = iter([stack.enter_context(host_memory(size, huge=True)) for _ in range(slots)])
        lock = threading.Lock()

        def work() -> None:
            driver.bind()
            while True:
                with lock:
                    host = next(hosts, None)
                if host is None:
                    return
                pinned = driver.pinned(host, size)
                pinned.__enter__()
                with lock:
                    stack.push(pinned.__exit__)

        return seconds(lambda: on_threads(threads, work))


def _stalls(driver: Driver, context: Context) -> list[float]:
    """Returns the longest times that a copy takes to be queued while other threads register memory."""
    size = 256 * KIB
    longest = []
    with ExitStack() as stack:
        host = stack.enter_context(host_memory(size, huge=False))
        stack.enter_context(driver.pinned(host, size))
        device = stack.enter_context(driver.device_memory(size))
        stream = stack.enter_context(driver.stream())
        for _ in range(context.repeats):
            other = threading.Thread(target=_register_all, args=(driver, THREADS, 2 * THREADS))
            other.start()
            worst = 0.0
            while other.is_alive():
                worst = max(worst, seconds(lambda: driver.copy(Copy(device, host, size), stream)))
                driver.synchronize(stream)
            other.join()
            longest.append(worst * 1e6)
    return longest


def allocation(context: Context) -> Rows:
    """Times the allocation of device memory, as large tensors and as segments for small ones."""
    driver = context.driver
    scale = context.total_bytes / (2 << 30)
    for count, size, parameter in ((27, 75 * MIB, "malloc_us"), (100, 20 * MIB, ""), (1030, 2 * MIB, "")):
        count, times = max(1, int(count * scale)), []
        for _ in range(context.repeats):
            with ExitStack() as stack:
                run = partial(_allocate, driver, stack, size, count)
                times.append(seconds(run) / count * 1e6)
        yield row(f"cuMemAlloc of {size // MIB} MiB", times, "us", parameter)
    yield from _tensors(context)


def _allocate(driver: Driver, stack: ExitStack, size: int, count: int) -> None:
    for _ in range(count):
        stack.enter_context(driver.device_memory(size))


def _tensors(context: Context) -> Rows:
    """Times `torch.empty` for small tensors, whose segments are new or cached."""
    import torch

    count = 18867 if context.total_bytes >= 1 << 30 else 50
    is_cuda = context.device.startswith("cuda")

    def make() -> list[torch.Tensor]:
        return [torch.empty(SMALL_TENSOR_BYTES, dtype=torch.uint8, device=context.device) for _ in range(count)]

    for state in ("new segments", "cached segments"):
        times = []
        for _ in range(context.repeats):
            if is_cuda and state == "new segments":
                torch.cuda.empty_cache()
            times.append(seconds(make) / count * 1e6)
        yield row(f"torch.empty, {state}", times, "us", "empty_us" if state == "cached segments" else "")


def objects(context: Context) -> Rows:
    """Times what the driver makes: streams, events and modules."""
    driver = context.driver
    makers: dict[str, tuple[str, Callable[[], int], str]] = {
        "cuStreamCreate": ("stream_us", lambda: driver.handle("cuStreamCreate", 1), "cuStreamDestroy_v2"),
        "cuEventCreate": ("event_us", lambda: driver.handle("cuEventCreate", UNTIMED | BLOCKING), "cuEventDestroy_v2"),
        "cuModuleLoadData": ("module_us", lambda: driver.handle("cuModuleLoadData", PTX), "cuModuleUnload"),
    }
    for name, (parameter, make, destroy) in makers.items():
        times = []
        try:
            for _ in range(context.repeats):
                start = time.perf_counter()
                made = make()
                times.append((time.perf_counter() - start) * 1e6)
                driver.call(destroy, made)
        except DriverError as error:
            yield row(f"{name}: {error}", [])
            continue
        yield row(name, times, "us", parameter)
