"""Locks of Python code in forked children."""

import os
import threading


def hold_across_forks(lock: "threading.Lock | threading.RLock") -> None:
    """Makes every fork wait for a lock, which both processes release after the fork.

    Otherwise a child that is forked while another thread holds the lock could never acquire it, and would see what the
    lock guards half changed. The lock must be one of the process, which its holder releases soon.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
