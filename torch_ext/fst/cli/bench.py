"""`fst bench`: the benchmarks, where they are installed."""

import argparse
import importlib
import sys


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    # With a prefix that no argument has, the options are left for the bench to read.
    parser = commands.add_parser(
        "bench",
        add_help=False,
        prefix_chars="\0",
        help="measure fst and its peers on this machine; all arguments are those of fst-bench",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        module = importlib.import_module("fst_bench.run")
    except ImportError as error:
        raise ImportError(
            f"The benchmarks are a separate package, which is missing or incomplete ({error}). "
            "Run `pip install ./benches` in a checkout of fst."
        ) from error
    sys.argv = ["fst bench", *arguments.arguments]
    module.main()
    return 0
