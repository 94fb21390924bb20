"""`fst bench`: runs the benchmarks, if their package is installed."""

import argparse
import sys


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    # No argument begins with this prefix, so all options are passed on.
    parser = commands.add_parser(
        "bench",
        add_help=False,
        prefix_chars="\0",
        help="run the benchmarks of fst and other libraries; takes the arguments of fst-bench",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from importlib.metadata import entry_points

    # The benchmarks import fst, so fst does not import them by name.
    found = [*entry_points(group="fst.commands", name="bench")]
    if not found:
        message = "The benchmarks are a separate package. Run `pip install ./benches` in a checkout of fst."
        if {"-h", "--help"}.intersection(arguments.arguments):
            print(f"usage: fst bench ...\n\n{message}")
            return 0
        raise ImportError(message)
    sys.argv = ["fst bench", *arguments.arguments]
    found[0].load()()
    return 0
