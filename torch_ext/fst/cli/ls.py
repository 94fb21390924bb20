"""`fst ls`: lists the files of checkpoints."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from fst._profile.formatting import format_count, format_size, visible
from fst.cli.arguments import Paths
from fst.cli.table import table
from fst.cli.verify import files_of


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the files of a checkpoint, local or remote; reads the headers only",
        description="Lists the files that a path or URL stands for, with the tensors in each.",
    )
    parser.add_argument("paths", nargs="+", action=Paths, metavar="PATH")
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="print the names of the tensors; reads only the index of a remote store",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.tensors:
        from fst._load.load import tensor_names

        names = tensor_names(arguments.paths)
        print(json.dumps({"names": names}, indent=2) if arguments.json else "\n".join(map(visible, names)))
        return 0
    files = [file for path in arguments.paths for file in files_of(path)]
    if arguments.json:
        print(json.dumps({"files": [{"path": file, **vars(_contents(file))} for file in files]}, indent=2))
        return 0
    rows = []
    for file in files:
        found = _contents(file)
        suffix = ", encrypted" if found.encrypted else ""
        rows.append([format_size(found.bytes), format_count(found.tensors, "tensor") + suffix, file])
    print(table(rows, right=[0], flexible=[2]))
    return 0


@dataclass
class _Contents:
    """Contents of a file. `bytes` counts the data of the tensors."""

    tensors: int
    bytes: int
    encrypted: bool


def _contents(file: str) -> _Contents:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    checkpoint = OpenCheckpoint(file)
    names = checkpoint.names()
    return _Contents(len(names), sum(checkpoint.tensor_info(name).nbytes for name in names), checkpoint.is_encrypted())
