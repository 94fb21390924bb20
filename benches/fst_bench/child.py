"""Process of one measurement, which prints its result as JSON."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any


class UnsupportedError(Exception):
    """The library or the machine does not support the action. The message gives the reason, for the tables."""


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[int]:
    """Redirects the output of libraries to stderr. Yields a descriptor of the real stdout."""
    real = os.dup(1)
    os.dup2(2, 1)
    yield real
    os.close(real)


def print_result(work: Callable[[], dict[str, Any]]) -> None:
    """Prints what `work` returns, or the reason why it is not supported."""
    with stdout_to_stderr() as real:
        try:
            result = work()
        except (ImportError, UnsupportedError) as reason:
            result = {"unavailable": str(reason)}
        os.write(real, json.dumps(result).encode())
