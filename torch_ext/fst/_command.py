"""Starts the command `fst` without PyTorch where it can do without.

A Python process that runs `python -m fst`, or the installed command, imports this package before the command itself.
The package imports PyTorch, which takes seconds, and fails where PyTorch is missing or does not fit. Help, the version,
`fst doctor`, `fst tmpfs` and `fst clean` need neither, so they end the process before that import.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

_HELP = {"-h", "--help"}
# Subcommands that need the library. Others, and misspelt ones, do not.
_NEED_LIBRARY = ("inspect", "verify", "sign", "key", "load", "convert", "delta", "bench")
# Statement of the script that pip installs for the command.
_SCRIPT_IMPORT = b"from fst.cli import main"


def start_early() -> None:
    """Runs the command and ends the process, if this process is the command and can run without the package.

    Ends the command with one line, not with a traceback, if it needs the library and cannot load it.
    """
    arguments = _arguments()
    if arguments is None:
        return
    # By name: both modules stand below this one, and other processes do not import them here.
    if _is_early(arguments):
        importlib.import_module("fst.cli").main(arguments)
    try:
        importlib.import_module("fst._core.library")
    except ImportError as error:
        sys.exit(f"fst: {error}")


def _arguments() -> list[str] | None:
    """Returns the arguments of the command, or None if this process is another program."""
    program, *arguments = getattr(sys, "argv", None) or [""]
    if program == "-m":
        # Python has not found the module yet. Its name stands before the arguments.
        module = sys.orig_argv[: len(sys.orig_argv) - len(arguments)][-1:]
        return arguments if module in (["fst"], ["-mfst"]) else None
    return arguments if Path(program).name == "fst" and _is_script(Path(program)) else None


def _is_script(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return _SCRIPT_IMPORT in file.read(4096)
    except OSError:
        return False


def _is_early(arguments: Sequence[str]) -> bool:
    if not arguments or arguments[0] not in _NEED_LIBRARY:
        return True
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    # `fst bench` passes its options on to another program.
    return options[:1] != ["bench"] and not _HELP.isdisjoint(options)


start_early()
