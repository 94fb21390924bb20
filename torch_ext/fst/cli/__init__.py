"""The command `fst`, which inspects, verifies, signs, converts and cleans checkpoints, and times loads.

Each subcommand is a module with two functions: `add` declares its arguments, and `run` executes it. Only `run` and the
functions that it calls import PyTorch, because help needs none.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fst._core.build import PACKAGE, layer_for, read_version, torch_releases
from fst._profile.formatting import visible, visible_lines
from fst.cli import (
    bench,
    cat,
    clean,
    completion,
    convert,
    delta,
    diff,
    doctor,
    inspect,
    key,
    ls,
    sign,
    time,
    tmpfs,
    verify,
)
from fst.cli.message import message_of
from fst.cli.sigterm import Terminated, end_at_sigterm

# Exit codes of programs that SIGINT and SIGTERM end, as in shells.
INTERRUPTED = 130
TERMINATED = 143


_WRONG = re.compile(r"(?:invalid choice: '?|unrecognized arguments: )([^\s'=]+)")


class _Parser(argparse.ArgumentParser):
    """Parser whose errors suggest the nearest word for a misspelt one.

    They show hidden characters of the arguments, which a shell may have expanded to file names.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here, and not in `parse_args` of the program, whose usage has no options of the subcommand.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if wrong := _WRONG.search(message):
            # Behind a wrong choice, the message lists the choices.
            words = [*completion.words_of(self), *re.findall(r"[\w-]+", message[wrong.end() :])]
            near = difflib.get_close_matches(wrong[1], words, 1)
            message += f"; did you mean {near[0]!r}?" if near else ""
        super().error(visible(message))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands. It sets `run` to the function of the subcommand."""
    parser = _Parser(
        prog="fst",
        description="Inspects, verifies, signs and converts safetensors checkpoints, and times loads. "
        "A PATH is a file, a directory with one checkpoint, an index file, or a URL of one of them.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the versions of fst and of its PyTorch")
    parser.set_defaults(run=None)
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(metavar="COMMAND")
    for module in (
        inspect,
        ls,
        cat,
        diff,
        verify,
        sign,
        key,
        time,
        convert,
        delta,
        doctor,
        tmpfs,
        clean,
        bench,
        completion,
    ):
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits. The exit code is 0 for success, 1 for failure, and 2 for invalid arguments."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The shell has closed it. Otherwise a file that is opened later would get its number.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    program = parser()
    parsed = program.parse_args(arguments)
    try:
        if parsed.version:
            print(_version())
            status = 0
        elif parsed.run is None:
            program.print_help()
            status = 0
        else:
            with end_at_sigterm():
                status = parsed.run(parsed)
        # Otherwise Python writes the buffered rest at exit, and reports a closed pipe.
        sys.stdout.flush()
    except Terminated:
        status = TERMINATED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Python flushes the output at exit once more, to a file that accepts it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except (OSError, ValueError, LookupError, ImportError, NotImplementedError, RuntimeError) as error:
        print(f"fst: {visible_lines(message_of(error))}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _version() -> str:
    releases = torch_releases()
    version = read_version(layer_for(releases[0])) if releases else None
    if version is None:
        raise ImportError(f"{PACKAGE}: the libraries of fst are missing or damaged; run `fst doctor`")
    return f"fst {version}, built for PyTorch {', '.join(releases)}"
