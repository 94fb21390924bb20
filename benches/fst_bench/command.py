"""Command of a benchmark, as its report names it."""

import shlex
import sys
from collections.abc import Sequence

# Options that name directories, which differ between machines and decide no figure.
_DIRECTORIES = ("--out", "--report", "--cache-dir")


def command_line(*program: str) -> str:
    """Returns the command that runs `program` with the arguments of this process, without directories."""
    return shlex.join([*program, *_without_directories(sys.argv[1:])])


def _without_directories(arguments: Sequence[str]) -> list[str]:
    words = iter(arguments)
    kept = []
    for word in words:
        option, has_value, _ = word.partition("=")
        if option not in _DIRECTORIES:
            kept.append(word)
        elif not has_value:
            next(words, None)
    return kept
