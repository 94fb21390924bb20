"""`fst inspect`: lists the tensors of a checkpoint. Reads the headers only."""

import argparse
import fnmatch
import json
import math
from collections import Counter

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.formatting import format_count, format_size, visible
from fst.cli.table import table


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("inspect", help="list names, dtypes, shapes and sizes; reads the headers only")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument(
        "--names", default="*", metavar="GLOB", help='list only matching tensors, such as "model.layers.0.*"'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    checkpoint = OpenCheckpoint(arguments.paths)
    names = [name for name in checkpoint.names() if fnmatch.fnmatchcase(name, arguments.names)]
    print(_json(checkpoint, names) if arguments.json else _text(checkpoint, names))
    return 0


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
        file = [checkpoint.path(name)] if several else []
        rows.append([name, info.dtype, str(info.shape), format_size(info.nbytes), *file])
        parameters[info.dtype] += math.prod(info.shape)
        size_bytes += info.nbytes
    counts = ", ".join(f"{number:,} {dtype}" for dtype, number in parameters.most_common())
    total = f"{format_count(len(names), 'tensor')} in {format_count(len(files), 'file')}, {format_size(size_bytes)}"
    metadata = [
        visible(f"{path}: {key} = {value}") for path, pairs in checkpoint.metadata() for key, value in pairs.items()
    ]
    return "\n".join([table(rows, right=[3]), "", f"{total}: {counts or 'no'} parameters", *metadata])


def _files(checkpoint: OpenCheckpoint) -> list[str]:
    """Returns the files that hold tensors or metadata, in their order."""
    paths = [checkpoint.path(name) for name in checkpoint.names()]
    return list(dict.fromkeys([*paths, *(path for path, _ in checkpoint.metadata())]))
