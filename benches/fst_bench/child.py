"""Processes of measurements, which print their results as JSON.

    python -m fst_bench.child MODULE:FUNCTION ARGUMENTS

calls a function of this package with the keyword arguments of a JSON object.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .directories import PACKAGE
from .unsupported import UnsupportedError

# OpenMP threads that spin while waiting take the cores from the threads they wait for. On a busy machine that made
# the same sum up to sixty times slower.
# The current directory stays off the module path, where it could hide a library.
# The first process writes the bytecode of fst in a checkout, as pip does for packages. Otherwise the import in each
# process would compile all modules.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": ""}
# Value of PYTHONDONTWRITEBYTECODE with which processes write no bytecode either.
NO_BYTECODE = "anywhere"
TIMEOUT_SECONDS = 300


def settings() -> dict[str, str]:
    """Returns the settings of processes that measure."""
    return SETTINGS | {key: text for key, text in os.environ.items() if text == NO_BYTECODE}


def plain_environment() -> dict[str, str]:
    """Returns the environment of a process that measures no other library."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(PACKAGE.parent)]))
    return os.environ | settings() | {"PYTHONPATH": path}


def run_child(
    work: str, arguments: Mapping[str, Any], environment: Mapping[str, str] | None, left_seconds: float
) -> dict[str, Any]:
    """Returns the result of a function in a process, {"failed": ...} if it failed, or {} if the time is over."""
    command = [sys.executable, "-m", f"{PACKAGE.name}.child", work, json.dumps(arguments)]
    timeout = min(TIMEOUT_SECONDS, left_seconds)
    try:
        done = subprocess.run(
            command, env=environment or plain_environment(), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {TIMEOUT_SECONDS} s"} if timeout == TIMEOUT_SECONDS else {}
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def function_of(work: str) -> Callable[..., Any]:
    """Returns the function of this package that a text such as "measure:measure" names."""
    module, _, name = work.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{PACKAGE.name}.{module}"), name)
    return function


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[int]:
    """Redirects the output of libraries to stderr. Yields a descriptor of the real stdout."""
    real = os.dup(1)
    os.dup2(2, 1)
    yield real
    os.close(real)


def main() -> None:
    """Prints the result of a function, or the reason why it is not supported."""
    with stdout_to_stderr() as real:
        try:
            result = function_of(sys.argv[1])(**json.loads(sys.argv[2]))
        except (ImportError, UnsupportedError) as reason:
            result = {"unavailable": str(reason)}
        os.write(real, json.dumps(result).encode())


if __name__ == "__main__":
    main()
