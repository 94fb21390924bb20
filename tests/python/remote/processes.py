"""Programs and children of the tests of remote sources."""

import os
import signal
import time
import traceback
from collections.abc import Callable

from forked import ForkedProgram

# Loads the checkpoint of its argument.
LOAD = "import sys, fst; fst.load_file(sys.argv[1]); fst.release_memory()"


def wait_for(program: ForkedProgram, condition: Callable[[], object]) -> None:
    """Waits until a condition holds. The program must not end before."""
    while not condition():
        assert program.process.is_alive(), program.errors
        time.sleep(0.01)


def run_in_fork(work: Callable[[], object]) -> None:
    """Runs a function, which must return, in a forked child. PyTorch's own threads do not survive the fork."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
