"""`fst bench`: runs the benchmarks, if their package is installed."""

import argparse
import importlib
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
    try:
        module = importlib.import_module("fst_bench.run")
    except ImportError as error:
        message = (
            f"The benchmarks are a separate package, which is missing or incomplete ({error}). "
            "Run `pip install ./benches` in a checkout of fst."
        )
        if {"-h", "--help"}.intersection(arguments.arguments):
            print(f"usage: fst bench ...\n\n{message}")
            return 0
        raise ImportError(message) from error
    sys.argv = ["fst bench", *arguments.arguments]
    module.main()
    return 0
