"""Deferral of `KeyboardInterrupt` during a collective load."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """SIGINT handler that records the signal, for the program's own handler to run later.

    A rank that leaves a collective early blocks the other ranks in it.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None) -> None:
        self._handler = handler
        self._frame: FrameType | None = None
        self._received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._received, self._frame = True, frame

    def deliver(self) -> None:
        """Calls the program's handler if SIGINT was received. Python's default handler raises `KeyboardInterrupt`."""
        if self._received and self._handler is not None:
            frame, self._frame, self._received = self._frame, None, False
            self._handler(signal.SIGINT, frame)


@contextmanager
def defer_interrupts() -> Iterator[DeferredInterrupts]:
    """Defers SIGINT to the end of the block, or to a call of `deliver`. Blocks may be nested."""
    if threading.current_thread() is not threading.main_thread():
        # Python runs signal handlers in the main thread only.
        yield DeferredInterrupts(None)
        return
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, DeferredInterrupts):
        yield handler
        return
    if not callable(handler):
        # SIG_DFL ends the process; SIG_IGN ignores the signal.
        yield DeferredInterrupts(None)
        return
    interrupts = DeferredInterrupts(handler)
    try:
        signal.signal(signal.SIGINT, interrupts)
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupts.deliver()
