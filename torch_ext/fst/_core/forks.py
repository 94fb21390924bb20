"""Locks of Python code in forked children."""

import os
from typing import Protocol


class Lock(Protocol):
    """`threading.Lock` or `threading.RLock`."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


def hold_across_forks(lock: Lock) -> None:
    """Makes every fork wait for a lock, which both processes release after the fork.

    Otherwise a child that is forked while another thread holds the lock could never acquire it, and would see what the
    lock guards half changed. The lock must be one of the process, which its holder releases soon.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
