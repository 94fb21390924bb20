"""Command `fst`, also `python -m fst_command`, without PyTorch where the command can do without.

The package `fst` imports PyTorch, which takes seconds, and fails where PyTorch is missing or does not fit. Help, the
version, `fst doctor`, `fst tmpfs`, `fst clean` and `fst completion` need neither.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

_HELP = {"-h", "--help"}
# Subcommands that need the library. Others, and misspelt ones, do not.
_NEED_LIBRARY = ("inspect", "ls", "cat", "diff", "verify", "sign", "key", "time", "convert", "delta", "bench")


def main() -> None:
    """Runs the command and exits. If the library cannot be loaded, the error is one line and not a traceback."""
    arguments = sys.argv[1:]
    if _needs_library(arguments):
        try:
            importlib.import_module("fst")
        except ImportError as error:
            sys.exit(f"fst: {error}")
    elif (spec := importlib.util.find_spec("fst")) is not None:
        # The package without its names, whose definitions import PyTorch: `fst.cli` can be imported from it.
        sys.modules["fst"] = importlib.util.module_from_spec(spec)
    importlib.import_module("fst.cli").main(arguments)


def _needs_library(arguments: Sequence[str]) -> bool:
    if not arguments or arguments[0] not in _NEED_LIBRARY:
        return False
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    # `fst bench` passes its options on to another program.
    return options[:1] == ["bench"] or _HELP.isdisjoint(options)


if __name__ == "__main__":
    main()
