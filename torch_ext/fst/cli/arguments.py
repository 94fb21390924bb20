"""Arguments that several subcommands have: paths, names, which mean the same in all of them, and numbers."""

import argparse
import difflib
import errno
import fnmatch
import glob
import os
from collections.abc import Sequence
from typing import Any

from fst._core.sizes import parse_size
from fst._core.urls import is_url

# Names that are compared with a pattern which matches none. A comparison takes 0.1 ms.
_COMPARED_MAX = 1000


def expanded(text: str) -> str:
    """Returns a path or URL. `~` becomes the home directory, also where a shell leaves it, as in `--trace=~/a.json`."""
    return text if is_url(text) else os.path.expanduser(text)


class Paths(argparse.Action):
    """Sets a list of paths. A path of no file that is a pattern, such as "a-*.safetensors", becomes what it matches."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        found = (
            [text] if is_url(text) or os.path.lexists(text) else sorted(glob.glob(text)) or [text]
            for text in map(expanded, values)
        )
        setattr(namespace, self.dest, [text for texts in found for text in texts])


def check_output(path: str) -> None:
    """Checks that a local file can be written, before the work whose result it gets."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"{path}: is a directory; give the path of a file in it")
    if not os.path.isdir(directory):
        raise FileNotFoundError(errno.ENOENT, f"{path}: there is no directory {directory}; create it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{path}: no permission to write to the directory; give another path")


def positive(text: str) -> int:
    """Returns a whole number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def size(text: str) -> int:
    """Returns a number of bytes, from a text such as "5GB" or "512MiB"."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_names(parser: argparse.ArgumentParser) -> None:
    """Declares the option `--names`."""
    parser.add_argument(
        "--names",
        action="append",
        metavar="GLOB",
        help='only tensors whose name matches, such as "model.layers.0.*"; may be given several times',
    )


def select(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Returns the names that are equal to a pattern or match one. Without patterns, returns all."""
    if patterns is None:
        return list(names)
    matching: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, names, 1) if len(names) <= _COMPARED_MAX else []
            example = f"; the first of {len(names):,} names is {names[0]!r}" if names else "; there are no tensors"
            if near:
                example = f"; the nearest of {len(names):,} names is {near[0]!r}"
            raise LookupError(f"no name of a tensor matches {pattern!r}{example}")
        matching |= found
    return [name for name in names if name in matching]
