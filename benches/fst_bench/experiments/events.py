"""How a thread learns that a copy is done."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

from .context import MIB, Context, Rows, row, seconds
from .driver import BLOCKING, UNTIMED, Copy, Driver, host_memory

POLL_SECONDS = 20e-6
CALLS = 100


def waits(context: Context) -> Rows:
    """Times copies until the host knows that they are done, and the calls that order them."""
    driver = context.driver
    size = min(4 * MIB, context.total_bytes)

    def synchronize(event: int) -> None:
        driver.call("cuEventSynchronize", event)

    def poll(event: int) -> None:
        while not driver.is_done(event):
            time.sleep(POLL_SECONDS)

    def spin(event: int) -> None:
        while not driver.is_done(event):
            pass

    ways: dict[str, tuple[int, Callable[[int], None]]] = {
        "an event with BLOCKING_SYNC": (UNTIMED | BLOCKING, synchronize),
        "an event without it": (UNTIMED, synchronize),
        "queries and pauses of 20 us": (UNTIMED, poll),
        "queries": (UNTIMED, spin),
    }
    with ExitStack() as stack:
        host = stack.enter_context(host_memory(size, huge=True))
        stack.enter_context(driver.pinned(host, size))
        device = stack.enter_context(driver.device_memory(size))
        stream = stack.enter_context(driver.stream())
        plain = stack.enter_context(driver.event(UNTIMED))
        copy = Copy(device, host, size)
        medians = {}
        for what, (flags, wait) in ways.items():
            with driver.event(flags) as event:
                run = partial(_copy_and_wait, driver, copy, stream, event, wait)
                times = context.times(run, 1e6)
            medians[what] = median(times)
            yield row(f"copy of {size // MIB} MiB until the host knows by {what}", times, "us")
        blocking, spinning = medians["an event with BLOCKING_SYNC"], medians["queries"]
        yield row("wake-up by BLOCKING_SYNC, beyond queries", [blocking - spinning], "us", "wake_us")
        calls: dict[str, Callable[[], object]] = {
            "copy_us": lambda: driver.copy(Copy(device, host, 4096), stream),
            "record_us": lambda: driver.record(plain, stream),
            "query_us": lambda: driver.is_done(plain),
            "stream_wait_us": lambda: driver.call("cuStreamWaitEvent", stream, plain, 0),
        }
        for parameter, work in calls.items():
            times = [_call_seconds(driver, stream, work) * 1e6 for _ in range(context.repeats)]
            yield row(f"one call, with Python's part: {parameter.removesuffix('_us')}", times, "us", parameter)


def _call_seconds(driver: Driver, stream: int, work: Callable[[], object]) -> float:
    """Returns the time of one call, from many in a row."""

    def run() -> None:
        for _ in range(CALLS):
            work()

    time = seconds(run) / CALLS
    driver.synchronize(stream)
    return time


def _copy_and_wait(driver: Driver, copy: Copy, stream: int, event: int, wait: Callable[[int], None]) -> None:
    driver.copy(copy, stream)
    driver.record(event, stream)
    wait(event)
