"""Converts a checkpoint to a peer's own format, in a separate process.

    python -m fst_bench.convert PEER SUFFIX PATH...

writes each path again with another suffix, unless that file exists. Prints the reason for a failure as JSON.
"""

import json
import os
import sys
from pathlib import Path

from .loaders.base import UnsupportedError
from .measure import stdout_to_stderr
from .peer import PEERS


def main() -> None:
    name, suffix, *paths = sys.argv[1:]
    with stdout_to_stderr() as real:
        try:
            loader = PEERS[name].open()
            for path in map(Path, paths):
                target = path.with_suffix(suffix)
                if not target.exists():
                    loader.convert(str(path), str(target))
        except (ImportError, UnsupportedError) as reason:
            os.write(real, json.dumps({"unavailable": str(reason)}).encode())


if __name__ == "__main__":
    main()
