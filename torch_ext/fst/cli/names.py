"""The option `--names`, which has one meaning in all subcommands."""

import argparse
import fnmatch
from collections.abc import Sequence


def add_names(parser: argparse.ArgumentParser) -> None:
    """Declares the option."""
    parser.add_argument(
        "--names",
        action="append",
        metavar="GLOB",
        help='only tensors whose name matches, such as "model.layers.0.*"; may be given several times',
    )


def select(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Returns the names that are equal to a pattern or match one. Without patterns, returns all.

    Raises:
        LookupError: No name matches a pattern.
    """
    if patterns is None:
        return list(names)
    matching: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not found:
            example = f"; the first of {len(names):,} names is {names[0]!r}" if names else "; there are no tensors"
            raise LookupError(f"no name of a tensor matches {pattern!r}{example}")
        matching |= found
    return [name for name in names if name in matching]
