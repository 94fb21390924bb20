"""Serves the files of a directory until its standard input ends.

    python -m fst_bench.http_server DIRECTORY --latency 0.02 --rate 50e6

prints its port. Each line `counts` on standard input is answered with the sums over all requests as JSON, and each
line `reset` with the sums before they become zero.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from .server import Server


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(
        prog="python -m fst_bench.http_server", description="Serves the files of a directory."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before the first byte of an answer")
    parser.add_argument("--connect-latency", type=float, default=0.0, help="seconds more on a new connection")
    parser.add_argument("--rate", type=float, help="bytes a second for each connection; default: unlimited")
    arguments = parser.parse_args()
    with Server(latency=arguments.latency, connect_latency=arguments.connect_latency, rate=arguments.rate) as server:
        for path in arguments.directory.rglob("*"):
            if path.is_file():
                server.put(str(path.relative_to(arguments.directory)), path)
        print(server.port, flush=True)
        for line in sys.stdin:
            print(json.dumps(dataclasses.asdict(server.counts())), flush=True)
            if line.strip() == "reset":
                server.reset()


if __name__ == "__main__":
    main()
