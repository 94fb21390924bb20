"""Ctrl-C while other ranks count on this one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """The handler of SIGINT while it is held back: notes the signal for the program's own handler to be called later.

    A rank that left a collective alone would keep the others waiting in it.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None) -> None:
        self._handler = handler
        self._frame: FrameType | None = None
        self._noted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._noted, self._frame = True, frame

    def let_out(self) -> None:
        """Calls the program's handler if there was a SIGINT. Python's own raises KeyboardInterrupt."""
        if self._noted and self._handler is not None:
            frame, self._frame, self._noted = self._frame, None, False
            self._handler(signal.SIGINT, frame)


@contextmanager
def interrupts_held() -> Iterator[Interrupts]:
    """Holds SIGINT back until the end of the block, except where the block lets it out. Blocks may be nested."""
    if threading.current_thread() is not threading.main_thread():
        # Python calls handlers in the main thread only.
        yield Interrupts(None)
        return
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts):
        yield handler
        return
    if not callable(handler):
        # The signal ends the process, or is ignored.
        yield Interrupts(None)
        return
    interrupts = Interrupts(handler)
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupts.let_out()
