"""Processes for the ranks of one measurement: forks of this process, without the time of imports."""

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def fork_pool(size: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Returns a pool of forked processes, which have their own garbage only.

    Otherwise, each process would inherit the counts of its parent, and soon search all imported modules for garbage,
    which copies their memory and takes 0.1 s and more of a load.
    """
    gc.freeze()
    return ProcessPoolExecutor(size, get_context("fork"), initializer)
