"""`fst inspect`: what a checkpoint holds, from its headers alone."""

import argparse
import fnmatch
import json
from collections import Counter

from fst.cli.contents import Contents, TensorFacts, contents
from fst.cli.text import count, size, table


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("inspect", help="names, dtypes, shapes and sizes; reads the headers only")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument(
        "--names", default="*", metavar="GLOB", help='only tensors like these, such as "model.layers.0.*"'
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found = contents(arguments.paths)
    chosen = [tensor for tensor in found.tensors if fnmatch.fnmatchcase(tensor.name, arguments.names)]
    print(_json(found, chosen) if arguments.json else _text(found, chosen))
    return 0


def _json(found: Contents, chosen: list[TensorFacts]) -> str:
    facts = {
        "files": [{"path": path, "metadata": found.texts.get(path, {})} for path in found.files],
        "tensors": [tensor._asdict() for tensor in chosen],
        "total": {
            "tensors": len(chosen),
            "parameters": sum(tensor.parameters for tensor in chosen),
            "bytes": sum(tensor.bytes for tensor in chosen),
        },
    }
    return json.dumps(facts, indent=2)


def _text(found: Contents, chosen: list[TensorFacts]) -> str:
    several = len(found.files) > 1
    rows = [["name", "dtype", "shape", "size", *(["file"] if several else [])]]
    by_dtype: Counter[str] = Counter()
    for tensor in chosen:
        rows.append(
            [tensor.name, tensor.dtype, str(tensor.shape), size(tensor.bytes), *([tensor.path] if several else [])]
        )
        by_dtype[tensor.dtype] += tensor.parameters
    held = f"{count(len(chosen), 'tensor')} in {count(len(found.files), 'file')}"
    parameters = ", ".join(f"{number:,} {dtype}" for dtype, number in by_dtype.most_common())
    total = f"{held}, {size(sum(tensor.bytes for tensor in chosen))}: {parameters or 'no'} parameters"
    metadata = [f"{path}: {key} = {value}" for path, texts in found.texts.items() for key, value in texts.items()]
    return "\n".join([table(rows, right=[3]), "", total, *metadata])
