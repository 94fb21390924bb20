"""The global interpreter lock."""

import threading
from collections.abc import Callable


def assert_released_by(function: Callable[[], object]) -> None:
    """Checks that another thread runs Python while a function runs."""
    turns: list[None] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(1e-4):
            turns.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = len(turns)
        function()
        during = len(turns) - before
    finally:
        stop.set()
        thread.join()
    # If the function held the lock, the thread could run once at most.
    assert during > 3
