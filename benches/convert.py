"""Writes a checkpoint in a peer's own format, in a process of its own.

    python -m benches.convert PEER PATH TARGET

Prints why it could not be done, as JSON, or nothing.
"""

import json
import os
import sys

from .loaders.base import UnsupportedError
from .measure import stdout_to_stderr
from .peer import PEERS


def main() -> None:
    name, path, target = sys.argv[1:]
    with stdout_to_stderr() as real:
        try:
            PEERS[name].open().convert(path, target)
        except (ImportError, UnsupportedError) as reason:
            os.write(real, json.dumps({"unavailable": str(reason)}).encode())


if __name__ == "__main__":
    main()
