"""The command `fst`: look at checkpoints, check them, time loads of them, convert them.

Each subcommand is a module with a function `add` that describes its arguments and a function that carries them out.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from fst.cli import bench, convert, inspect, load, verify

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """All subcommands, each with its function as `run`."""
    parser = argparse.ArgumentParser(
        prog="fst",
        description="Safetensors checkpoints: look at them, check them, time loads, convert. "
        "A PATH is a file, a directory with one checkpoint, or an index file.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (inspect, verify, load, convert, bench):
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits: 0 if it did what was asked, 1 if not, 2 if it was asked wrongly."""
    chosen = parser().parse_args(arguments)
    try:
        status = chosen.run(chosen)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain once more while it exits.
        sys.stderr.close()
        status = 0
    except (OSError, ValueError, LookupError, ImportError, NotImplementedError, RuntimeError) as error:
        # str() of a KeyError is its message in quotes.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"fst: {message}", file=sys.stderr)
        status = 1
    sys.exit(status)
