"""Saves in the background: snapshots in host memory, one thread that writes them, and deferred errors."""

import atexit
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from fst._save.host_copy import HostCopy


class SaveFuture(Future[None]):
    """Future of a save in the background. It cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_known = False

    def cancel(self) -> bool:
        """Returns False: the save goes on."""
        return False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the save, and returns its error, or None."""
        error = super().exception(timeout)
        self.is_known = True
        return error

    def result(self, timeout: float | None = None) -> None:
        """Waits for the save, and raises its error."""
        self.exception(timeout)
        super().result()


class BackgroundSaves:
    """Saves of this process in the background, which run one after the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all saves. A forked child has no thread that completes its parent's saves."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fst-save")
        self._ended = threading.Condition()
        # Saves that have a copy, or are about to make one.
        self._open: list[SaveFuture] = []
        self._futures: list[SaveFuture] = []

    def start(
        self, copy: Callable[[], HostCopy], save: Callable[[Mapping[str, Tensor]], None], max_snapshots: int = 1
    ) -> SaveFuture:
        """Waits until fewer than `max_snapshots` copies exist, makes another with `copy`, and saves it later."""
        future = SaveFuture()
        future.add_done_callback(self._release)
        try:
            with self._ended:
                self._ended.wait_for(lambda: len(self._open) < max_snapshots)
                self._open.append(future)
            self._futures.append(future)
            self._executor.submit(_run, future, copy(), save)
        except BaseException:
            # A save that has begun goes on. No other will begin, and an interrupt at any line above leaves no copy.
            Future.cancel(future)
            raise
        return future

    def wait(self, snapshots: int = 0) -> None:
        """Waits until at most `snapshots` copies exist. Without any, all saves have ended."""
        with self._ended:
            self._ended.wait_for(lambda: len(self._open) <= snapshots)

    def raise_pending(self) -> None:
        """Raises the error of a save that has failed, if the program has not asked how that save has ended."""
        for future in [future for future in self._futures if future.done()]:
            if not future.is_known and not future.cancelled():
                future.result()
            self._futures.remove(future)

    def warn_pending(self) -> None:
        """Warns of the error that `raise_pending` would raise."""
        try:
            self.raise_pending()
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            warnings.warn(f"a save in the background has failed: {text}", RuntimeWarning, stacklevel=1)

    def _release(self, future: Future[None]) -> None:
        with self._ended:
            self._open = [other for other in self._open if other is not future]
            self._ended.notify_all()


def _run(future: SaveFuture, copy: HostCopy, save: Callable[[Mapping[str, Tensor]], None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        save(copy.tensors())
    except BaseException as error:
        _clear_frames(error)
        copy.release()
        future.set_exception(error)
    else:
        copy.release()
        future.set_result(None)


def _clear_frames(error: BaseException | None) -> None:
    """Clears the frames of an error, which refer to the tensors. A future keeps its error alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


background = BackgroundSaves()
os.register_at_fork(after_in_child=background.reset)
# Runs after the threads of executors have ended.
atexit.register(background.warn_pending)
