"""`fst inspect`: what a checkpoint holds, from its headers alone."""

import argparse
import fnmatch
import json
from collections import Counter
from typing import Any

from fst._checkpoint import Checkpoint, Entry
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
    checkpoint = Checkpoint(arguments.paths)
    chosen = [entry for entry in checkpoint.entries() if fnmatch.fnmatchcase(entry.name, arguments.names)]
    print(_json(checkpoint, chosen) if arguments.json else _text(checkpoint, chosen))
    return 0


def _json(checkpoint: Checkpoint, entries: list[Entry]) -> str:
    texts = dict(checkpoint.texts())
    facts: dict[str, Any] = {
        "files": [{"path": path, "metadata": texts.get(path, {})} for path in checkpoint.files()],
        "tensors": [entry._asdict() for entry in entries],
        "total": {"tensors": len(entries), "parameters": sum(map(_parameters, entries)), "bytes": _bytes(entries)},
    }
    return json.dumps(facts, indent=2)


def _text(checkpoint: Checkpoint, entries: list[Entry]) -> str:
    files = checkpoint.files()
    several = len(files) > 1
    rows = [["name", "dtype", "shape", "size", *(["file"] if several else [])]]
    for entry in entries:
        file = [entry.path] if several else []
        rows.append([entry.name, entry.dtype, str(entry.shape), size(entry.bytes), *file])
    by_dtype: Counter[str] = Counter()
    for entry in entries:
        by_dtype[entry.dtype] += _parameters(entry)
    parameters = ", ".join(f"{number:,} {dtype}" for dtype, number in by_dtype.most_common())
    lines = [table(rows, right=[3]), ""]
    held = f"{count(len(entries), 'tensor')} in {count(len(files), 'file')}, {size(_bytes(entries))}"
    lines.append(f"{held}: {parameters or 'no'} parameters")
    for path, texts in checkpoint.texts():
        lines += [f"{path}: {key} = {value}" for key, value in texts.items()]
    return "\n".join(lines)


def _parameters(entry: Entry) -> int:
    number = 1
    for length in entry.shape:
        number *= length
    return number


def _bytes(entries: list[Entry]) -> int:
    return sum(entry.bytes for entry in entries)
