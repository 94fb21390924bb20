"""`fst cat`: prints the values of a tensor."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from fst.cli.arguments import expanded

_INDEX = re.compile(r"-?\d+|\.\.\.|(-?\d+)?:(-?\d+)?(?::(\d+)?)?")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cat",
        help="print the values of a tensor, or write its bytes",
        description="Prints the dtype, the shape and the values of a tensor, as PyTorch prints them. Reads only this "
        "tensor, and of it only what --slice selects.",
    )
    parser.add_argument("path", type=expanded, metavar="PATH")
    parser.add_argument("name", metavar="NAME", help="the name of the tensor")
    parser.add_argument(
        "--slice", type=_indices, default=..., metavar="INDICES", help='a part, as in Python: --slice="0:4, ::2"'
    )
    parser.add_argument(
        "--raw", action="store_true", help="write the bytes of the elements, in row-major order and little-endian"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from fst._checkpoint.safe_open import safe_open

    with safe_open(arguments.path) as file:
        stored = file.get_slice(arguments.name)
        loaded = stored[arguments.slice]
        if arguments.raw:
            import torch

            sys.stdout.buffer.write(loaded.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            print(stored.get_dtype(), [*loaded.shape])
            print(loaded)
    return 0


def _indices(text: str) -> Any:
    """Returns the index of a tensor that a text such as "0:4, ::2" describes."""
    return tuple(map(_index, text.split(",")))


def _index(text: str) -> Any:
    found = _INDEX.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not an index; expected one such as 3, 0:4, ::2 or ...")
    if ":" in found[0]:
        return slice(*(None if number is None else int(number) for number in found.groups()))
    return ... if found[0] == "..." else int(found[0])
