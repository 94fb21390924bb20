"""`fst verify`: every check that can be made of a checkpoint, and a clear verdict."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._load.stream import stream
from fst.cli.text import count, size

BLOCK_BYTES = 16 << 20


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="check files whole, down to the last byte",
        description="Checks each header whole, that names are in one file only, that an index promises what its files "
        "hold, and that every byte can be read. The exit code is 0 if all is well.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--finite", action="store_true", help="look for NaN and infinity in the tensors too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    wrong = 0
    for path in arguments.paths:
        for what, check in _checks(Path(path), arguments.finite):
            try:
                print(f"ok      {what}: {check()}", flush=True)
            except (OSError, ValueError, LookupError, NotImplementedError) as error:
                wrong += 1
                print(f"WRONG   {what}: {error.args[0] if isinstance(error, KeyError) else error}", flush=True)
    print("all is well" if wrong == 0 else f"{count(wrong, 'check')} failed")
    return int(wrong > 0)


def _checks(path: Path, finite: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """The checks of a path, from the cheapest on, each of which says what it found or raises."""
    files = _files(path)
    for file in files:
        yield f"header of {file}", lambda file=file: _header(str(file))  # type: ignore[misc]
    if files != [path]:
        yield f"names of {path}", lambda: _header(str(path))
    for file in files:
        yield f"bytes of {file}", lambda file=file: _read(file)  # type: ignore[misc]
    if finite:
        yield f"values of {path}", lambda: _finite(str(path))


def _files(path: Path) -> list[Path]:
    """Each file that a path leads to, so that one that is wrong does not keep the others from being checked."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors")) or [path]
    if path.name.endswith(".safetensors.index.json"):
        try:
            names = json.loads(path.read_text())["weight_map"].values()
            return [path.parent / name for name in sorted(set(names))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # What is wrong with it, opening it will say.
            return [path]
    return [path]


def _header(path: str) -> str:
    checkpoint = OpenCheckpoint(path)
    names = checkpoint.names()
    return f"{count(len(names), 'tensor')}, {size(sum(checkpoint.tensor_info(name).nbytes for name in names))}"


def _read(path: Path) -> str:
    expected, done = path.stat().st_size, 0
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            done += length
    if done != expected:
        raise OSError(f"{done} bytes could be read, but the file had {expected} bytes")
    return f"{done:,} bytes read"


def _finite(path: str) -> str:
    strange = []
    number = 0
    for name, tensor in stream(path):
        number += 1
        if (tensor.is_floating_point() or tensor.is_complex()) and not _is_finite(tensor):
            strange.append(name)
    if strange:
        raise ValueError(f"NaN or infinity in {count(len(strange), 'tensor')}: {', '.join(strange)}")
    return f"{count(number, 'tensor')} without NaN and infinity"


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return True  # that format has neither
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    return bool(torch.isfinite(tensor).all())
