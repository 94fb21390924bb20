"""Orderly end of the command at SIGTERM, as at Ctrl-C: nothing stays of files and uploads that are not complete."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


class Terminated(BaseException):
    """SIGTERM ended the command."""


@contextlib.contextmanager
def end_at_sigterm() -> Iterator[None]:
    """Ends the block at SIGTERM with the exception `Terminated`.

    Python delays its handlers until an operator returns, but an operator notices SIGINT at once. So a thread, which
    Python tells of each signal through a pipe, sends SIGINT to the process. If the program ignores or handles SIGINT,
    or this is not the main thread, SIGTERM has its default action.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    is_terminated = threading.Event()

    def forward() -> None:
        # The end of the pipe is the end of the block.
        while signals := os.read(received, 1):
            if signal.SIGTERM in signals:
                is_terminated.set()
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=forward, name="fst-sigterm", daemon=True)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if is_terminated.is_set():
            raise Terminated from interrupt
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        os.close(sent)
        thread.join()
        os.close(received)
