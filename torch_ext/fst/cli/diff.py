"""`fst diff`: compares the names, dtypes, shapes and values of two checkpoints."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, NamedTuple

from fst._profile.formatting import format_count
from fst.cli.arguments import add_names, expanded, select
from fst.cli.table import table

if TYPE_CHECKING:
    from fst._checkpoint.checkpoint import OpenCheckpoint
    from fst._checkpoint.region import Region


class Difference(NamedTuple):
    """Difference between the tensors of one name in two checkpoints.

    Attributes:
        name: The name of the tensor.
        kind: "removed", "added", "dtype", "shape" or "values".
        old, new: What the checkpoints have. For values, the number of different elements and where the first one is.
    """

    name: str
    kind: str
    old: str
    new: str


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare the tensors of two checkpoints",
        description="Compares names, dtypes, shapes and the bits of all values. The exit code is 1 if any differ.",
    )
    parser.add_argument("old", type=expanded, metavar="OLD")
    parser.add_argument("new", type=expanded, metavar="NEW")
    add_names(parser)
    parser.add_argument("--headers", action="store_true", help="compare names, dtypes and shapes only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    old, new = OpenCheckpoint(arguments.old), OpenCheckpoint(arguments.new)
    names = select(list(dict.fromkeys([*old.names(), *new.names()])), arguments.names)
    found = [found for name in names if (found := _compare(old, new, name, arguments.headers)) is not None]
    if arguments.json:
        print(json.dumps({"tensors": len(names), "differences": [item._asdict() for item in found]}, indent=2))
    else:
        if found:
            print(table([["name", "difference", "old", "new"], *found], flexible=[0]), end="\n\n")
        print(f"{len(found):,} of {format_count(len(names), 'tensor')} {'differs' if len(found) == 1 else 'differ'}")
    return 1 if found else 0


def _compare(old: OpenCheckpoint, new: OpenCheckpoint, name: str, headers_only: bool) -> Difference | None:
    """Returns the first way in which a tensor differs, or None if it does not."""
    if name not in new.positions:
        return Difference(name, "removed", _entry(old, name), "")
    if name not in old.positions:
        return Difference(name, "added", "", _entry(new, name))
    before, after = old.tensor_info(name), new.tensor_info(name)
    if before.dtype != after.dtype:
        return Difference(name, "dtype", before.dtype, after.dtype)
    if before.shape != after.shape:
        return Difference(name, "shape", str(before.shape), str(after.shape))
    return None if headers_only else _compare_values(old, new, name)


def _entry(checkpoint: OpenCheckpoint, name: str) -> str:
    info = checkpoint.tensor_info(name)
    return f"{info.dtype} {info.shape}"


def _compare_values(old: OpenCheckpoint, new: OpenCheckpoint, name: str) -> Difference | None:
    import torch

    from fst._checkpoint.batched import load_parts

    count, first = 0, ""
    for region, parts in load_parts([(old, name), (new, name)]):
        # Bytes of each element, since NaN differs from itself.
        before, after = (part.view(torch.uint8).view(part.numel(), -1) for part in parts)
        if torch.equal(before, after):
            continue
        differ = (before != after).any(1).nonzero().flatten()
        first = first or str(_index_of(region, int(differ[0])))
        count += len(differ)
    return Difference(name, "values", format_count(count, "element"), f"from {first}") if count else None


def _index_of(region: Region, position: int) -> list[int]:
    """Returns the index in the tensor of an element at a position in a region."""
    index = []
    for start, length, step in reversed(region):
        index.append(start + position % length * step)
        position //= length
    return index[::-1]
