"""Programs of the tests of remote sources."""

import time
from collections.abc import Callable

from forked import ForkedProgram

# Loads the checkpoint of its argument.
LOAD = "import sys, fst; fst.load_file(sys.argv[1]); fst.release_memory()"
# Prints all that users see of loads of its arguments: errors, summary and trace.
SHOW = """
import sys, fst
with fst.profile() as profile:
    for url in sys.argv[2:]:
        for use in (fst.load_file, lambda path: fst.safe_open(path, "pt"), lambda path: list(fst.stream(path))):
            try:
                use(url)
            except OSError as error:
                print(repr(error), error)
print(profile.summary())
profile.save_trace(sys.argv[1])
print(open(sys.argv[1]).read())
"""


def wait_for(program: ForkedProgram, condition: Callable[[], object]) -> None:
    """Waits until a condition holds. The program must not end before."""
    while not condition():
        assert program.process.is_alive(), program.errors
        time.sleep(0.01)
