"""Copies from pinned memory: fixed cost, rate, and what events and streams add."""

import threading
from contextlib import ExitStack
from itertools import cycle

from .context import KIB, MIB, Context, Rows, on_threads, row, seconds
from .driver import BLOCKING, UNTIMED, Copy, Driver, host_memory

SIZES = (256 * KIB, MIB, 15 * MIB // 4, 15 * MIB)
SLOTS_BYTES = 128 * MIB
SUBMITTERS = 16
# Events are used in turn, as the slots of a load are.
EVENTS = 32


def copies(context: Context) -> Rows:
    """Times copies by their size, streams, events and submitters."""
    driver, total, repeats = context.driver, context.total_bytes, context.repeats
    area = min(SLOTS_BYTES, total)
    with host_memory(area, huge=True) as host, driver.device_memory(area) as device, driver.pinned(host, area):
        queue = Queue(driver, host, device, area)
        queue.time(area, area)
        rates = [total / queue.time(area, total) for _ in range(repeats)]
        yield row("link, from the largest copies", [rate / 1e9 for rate in rates], "GB/s", "link_gbps")
        variants = {
            "one stream": {},
            "two streams in turn": {"streams": 2},
            "one stream, an event after each copy": {"event": UNTIMED},
            "one stream, an event with BLOCKING_SYNC after each copy": {"event": UNTIMED | BLOCKING},
            "two streams in turn, an event with BLOCKING_SYNC after each copy": {
                "streams": 2,
                "event": UNTIMED | BLOCKING,
            },
            f"one stream, {SUBMITTERS} submitters": {"submitters": SUBMITTERS},
        }
        parameters = {"one stream": "dead_same_us", "two streams in turn": "dead_other_us"}
        for size in (size for size in SIZES if size <= area):
            count = max(1, total // size)
            for what, variant in variants.items():
                times = [queue.time(size, count * size, **variant) for _ in range(repeats)]
                beyond = [(time / count - size / max(rates)) * 1e6 for time in times]
                parameter = parameters.get(what, "") if size == SIZES[2] else ""
                yield row(f"copy of {size // KIB} KiB beyond its bytes, {what}", beyond, "us", parameter)


class Queue:
    """Copies from one area of host memory to one of the device."""

    def __init__(self, driver: Driver, host: int, device: int, size: int) -> None:
        self._driver, self._host, self._device, self._size = driver, host, device, size

    def time(self, size: int, total: int, *, streams: int = 1, event: int | None = None, submitters: int = 1) -> float:
        """Returns the seconds that `total` bytes take in copies of `size` bytes, with an event after each if asked."""
        driver = self._driver
        places = range(0, self._size - size + 1, size)
        with ExitStack() as stack:
            handles = [stack.enter_context(driver.stream()) for _ in range(streams)]
            events = [] if event is None else [stack.enter_context(driver.event(event)) for _ in range(EVENTS)]
            lock = threading.Lock()
            turns = iter(range(max(1, total // size)))
            turn_of_event = cycle(events) if events else None

            def submit() -> None:
                driver.bind()
                while True:
                    with lock:
                        turn = next(turns, None)
                        if turn is None:
                            return
                        stream = handles[turn % streams]
                        place = places[turn % len(places)]
                        driver.copy(Copy(self._device + place, self._host + place, size), stream)
                        if turn_of_event:
                            driver.record(next(turn_of_event), stream)

            def run() -> None:
                if submitters == 1:
                    submit()
                else:
                    on_threads(submitters, submit)
                for stream in handles:
                    driver.synchronize(stream)

            return seconds(run)
