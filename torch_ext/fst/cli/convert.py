"""`fst convert`: PyTorch's own files into safetensors, and safetensors into fewer, more, or others."""

import argparse
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._load.load import load_files
from fst._save.save import save_file
from fst.cli.load import DTYPES
from fst.cli.text import count, size

PICKLED = {".bin", ".ckpt", ".pt", ".pth"}
SHARD_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "convert",
        help="PyTorch files to safetensors; merge, shard or cast safetensors",
        description="Reads .pt, .pth, .bin and .ckpt files (with weights_only, so that no code in them runs) and "
        "safetensors checkpoints, and writes one safetensors checkpoint with all their tensors.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("target", help="the .safetensors file to write; shards and their index are named after it")
    parser.add_argument("--dtype", choices=list(DTYPES), help="cast floating-point tensors")
    parser.add_argument("--key", help='the entry of a PyTorch file that holds the tensors, such as "state_dict"')
    parser.add_argument(
        "--max-shard-size", type=_bytes, metavar="SIZE", help='such as "5GB" or "512MiB"; default: one file'
    )
    parser.set_defaults(run=run)


def _bytes(text: str) -> int:
    found = SHARD_SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected one such as 5GB or 512MiB")
    return int(float(found[1]) * FACTORS[(found[2] or "").lower()])


def run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.target)
    if target.suffix != ".safetensors":
        raise ValueError(f"{target}: the target's name must end in .safetensors")
    dtype = DTYPES.get(arguments.dtype)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in map(Path, arguments.paths):
        is_pickled = path.suffix in PICKLED
        if is_pickled:
            found = _from_pickle(path, arguments.key, dtype)
            metadata.setdefault("format", "pt")
        else:
            found = load_files([path], dtype=dtype)
            for _, file_metadata in OpenCheckpoint(path).metadata():
                metadata |= file_metadata
        if twice := tensors.keys() & found.keys():
            raise ValueError(f"{path}: {min(twice)!r} is in a file before it too; convert them one by one")
        tensors |= found
    save_file(_apart(tensors), target, metadata=metadata or None, max_shard_bytes=arguments.max_shard_size)
    print(f"{target}: {count(len(tensors), 'tensor')}, {size(sum(tensor.nbytes for tensor in tensors.values()))}")
    return 0


def _from_pickle(path: Path, key: str | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    # Files of PyTorch before 1.6 are no archives and cannot be mapped.
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path}: a file with nothing but tensors was expected, which weights_only reads: {error}"
        ) from error
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            there = ", ".join(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
            raise KeyError(f"{path}: there is no entry {key!r} but {there}")
        content = content[key]
    found = dict(_flat(path, content, ""))
    if dtype is None:
        return found
    castable = set(DTYPES.values())
    return {name: tensor.to(dtype) if tensor.dtype in castable else tensor for name, tensor in found.items()}


def _flat(path: Path, content: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries, named with dots between the keys."""
    if isinstance(content, Tensor):
        yield prefix, content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(path, value, f"{prefix}.{key}" if prefix else str(key))
    else:
        raise ValueError(
            f"{path}: {prefix or 'the file'} is a {type(content).__name__}, and safetensors holds tensors only; "
            "name the entry with the tensors with --key"
        )


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory with one before them are copied: each name gets bytes of its own in the file."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen and tensor.numel() else tensor
        seen.add(storage)
    return apart
