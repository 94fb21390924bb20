"""`fst inspect`: lists the tensors of a checkpoint. Reads the headers only."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fst._profile.formatting import format_count, format_size, visible_lines
from fst.cli.arguments import Paths, add_names, positive, select
from fst.cli.message import message_of
from fst.cli.table import fit, table
from fst.cli.tree import Module, sum_by_module
from fst.cli.verify import files_of

if TYPE_CHECKING:
    from fst._checkpoint.checkpoint import OpenCheckpoint


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="list names, dtypes, shapes and sizes; reads the headers only")
    parser.add_argument("paths", nargs="+", action=Paths, metavar="PATH")
    add_names(parser)
    parser.add_argument("--tree", action="store_true", help="list the sums of each module instead of tensors")
    parser.add_argument(
        "--depth", type=positive, metavar="N", help="levels of modules that --tree lists; without it, all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    try:
        checkpoint, status = OpenCheckpoint(arguments.paths), 0
    except (OSError, RuntimeError, ValueError) as error:
        checkpoint, status = OpenCheckpoint(_valid_files(arguments.paths, error)), 1
    names = select(checkpoint.names(), arguments.names)
    if arguments.tree or arguments.depth is not None:
        whole = _tree(checkpoint, names)
        print(_tree_json(whole, arguments.depth) if arguments.json else _tree_text(whole, arguments.depth))
    else:
        print(_json(checkpoint, names) if arguments.json else _text(checkpoint, names))
    return status


def _valid_files(paths: list[str], error: Exception) -> list[str]:
    """Returns the files that can be opened, and prints the errors of the others. Raises `error` for none or all."""
    from fst._checkpoint.checkpoint import OpenCheckpoint

    files = [file for path in paths for file in files_of(path)]
    valid, messages = [], []
    for file in files:
        try:
            OpenCheckpoint(file)
            valid.append(file)
        except (OSError, RuntimeError, ValueError) as failure:
            messages.append(f"fst: {visible_lines(message_of(failure))}")
    if not valid or not messages:
        raise error
    print("\n".join(messages), file=sys.stderr)
    return valid


def _tree(checkpoint: OpenCheckpoint, names: list[str]) -> Module:
    infos = ((name, checkpoint.tensor_info(name)) for name in names)
    return sum_by_module((name, math.prod(info.shape), info.nbytes) for name, info in infos)


def _tree_json(whole: Module, depth: int | None) -> str:
    modules = [
        {"name": module.name, "tensors": module.tensors, "parameters": module.parameters, "bytes": module.bytes}
        for _, module in whole.walk(depth)
    ]
    return json.dumps({"modules": modules}, indent=2)


def _tree_text(whole: Module, depth: int | None) -> str:
    rows = [["module", "tensors", "parameters", "size"]]
    for level, module in whole.walk(depth):
        # The first row has the sums of the whole checkpoint.
        name = "  " * (level - 1) + module.name.rpartition(".")[2] if level else "(all)"
        rows.append([name, f"{module.tensors:,}", f"{module.parameters:,}", format_size(module.bytes)])
    return table(rows, right=[1, 2, 3], flexible=[0])


def _json(checkpoint: OpenCheckpoint, names: list[str]) -> str:
    metadata = dict(checkpoint.metadata())
    infos = {name: checkpoint.tensor_info(name) for name in names}
    report = {
        "files": [{"path": path, "metadata": metadata.get(path, {})} for path in _files(checkpoint)],
        "tensors": [
            {
                "name": name,
                "dtype": info.dtype,
                "shape": info.shape,
                "bytes": info.nbytes,
                "path": checkpoint.path(name),
            }
            for name, info in infos.items()
        ],
        "encrypted": checkpoint.is_encrypted(),
        "total": {
            "tensors": len(infos),
            "parameters": sum(math.prod(info.shape) for info in infos.values()),
            "bytes": sum(info.nbytes for info in infos.values()),
        },
    }
    return json.dumps(report, indent=2)


def _text(checkpoint: OpenCheckpoint, names: list[str]) -> str:
    files = _files(checkpoint)
    several = len(files) > 1
    rows = [["name", "dtype", "shape", "size", *(["file"] if several else [])]]
    parameters: Counter[str] = Counter()
    size_bytes = 0
    for name in names:
        info = checkpoint.tensor_info(name)
        file = [checkpoint.path(name).rpartition("/")[2]] if several else []
        rows.append([name, info.dtype, str(info.shape), format_size(info.nbytes), *file])
        parameters[info.dtype] += math.prod(info.shape)
        size_bytes += info.nbytes
    counts = ", ".join(f"{number:,} {dtype}" for dtype, number in parameters.most_common())
    total = f"{format_count(len(names), 'tensor')} in {format_count(len(files), 'file')}, {format_size(size_bytes)}"
    if checkpoint.is_encrypted():
        total += ", encrypted"
    return "\n".join(
        [
            table(rows, right=[3], flexible=[0, 4] if several else [0]),
            "",
            f"{total}: {counts or 'no'} parameters",
            *map(fit, _metadata(checkpoint, len(files))),
        ]
    )


def _metadata(checkpoint: OpenCheckpoint, files: int) -> Iterator[str]:
    """Yields the metadata: once if all files have the same value, which most shards do."""
    paths: dict[tuple[str, str], list[str]] = {}
    for path, pairs in checkpoint.metadata():
        for key, value in pairs.items():
            paths.setdefault((key, _shown(key, value)), []).append(path)
    for (key, value), found in paths.items():
        places = ["all files"] if files > 1 and len(found) == files else found
        yield from (f"{place}: {key} = {value}" for place in places)


def _shown(key: str, value: str) -> str:
    """Returns a value of the metadata. For digests, returns the header's digest, which covers all others."""
    from fst._core.arguments import DIGESTS_KEY

    return ":".join(value.split(":")[:2]) if key == DIGESTS_KEY else value


def _files(checkpoint: OpenCheckpoint) -> list[str]:
    """Returns the files that hold tensors or metadata, in their order."""
    paths = [checkpoint.path(name) for name in checkpoint.names()]
    return list(dict.fromkeys([*paths, *(path for path, _ in checkpoint.metadata())]))
