"""`fst convert`: converts PyTorch files to safetensors, and merges, shards, casts or renames safetensors."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fst._core.urls import is_remote, is_url, without_secrets
from fst._profile.formatting import format_count, format_size, visible
from fst.cli.arguments import Paths, check_output, expanded, select, size
from fst.cli.inputs import Inputs, Origin
from fst.cli.time import add_dtype, requested_dtypes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fst._core.encryption_key import EncryptionKey

_SUFFIXES = (".safetensors", ".tensors")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert PyTorch and tensorizer files to safetensors; merge, shard, cast or rename safetensors",
        description="Reads checkpoints in the formats of safetensors and tensorizer, and PyTorch files (.pt, .pth, "
        ".bin, .ckpt), directories and indices of them, and writes all tensors to one safetensors checkpoint, or to "
        "one .tensors file. PyTorch files are read with weights_only=True, so code in them does not run.",
    )
    parser.add_argument("paths", nargs="+", action=Paths, metavar="PATH")
    parser.add_argument(
        "target",
        type=expanded,
        help="the .safetensors file or URL to write; names of shards and their index derive from it. Or a .tensors "
        "file",
    )
    add_dtype(parser)
    parser.add_argument(
        "--recipe",
        type=expanded,
        metavar="FILE",
        help="make the tensors by the rules in this file, one a line; see docs/converting.md",
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="turn quantized tensors into numbers, and leave their scales out"
    )
    parser.add_argument("--key", help='key of the tensors in a PyTorch file, such as "state_dict"')
    parser.add_argument(
        "--tensors-only", action="store_true", help="leave out values of a PyTorch file that are not tensors"
    )
    parser.add_argument(
        "--drop",
        action="append",
        metavar="GLOB",
        help="leave out tensors whose name matches, such as '*.inv_freq'; may be given several times",
    )
    parser.add_argument(
        "--rename",
        action="append",
        type=_renaming,
        metavar="OLD=NEW",
        help="rename tensors, such as 'model.{*rest}={*rest}'. {k} stands for a component of a name, {*rest} for one "
        "or more; may be given several times, and the first that matches a name renames it",
    )
    parser.add_argument(
        "--metadata",
        action="append",
        type=_entry,
        metavar="KEY=VALUE",
        help="put an entry into the metadata of each file; may be given several times",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size,
        metavar="SIZE",
        help='upper bound for the data in a file, such as "5GB" or "512MiB"; without it, one file is written',
    )
    parser.add_argument(
        "--digests",
        choices=["blake3", "sha256", "none"],
        help="put digests of the tensors into the files, for fst verify; by default if an input has them",
    )
    parser.add_argument(
        "--encrypt", type=expanded, metavar="KEY", help="encrypt the data with the key in this file, see fst key"
    )
    parser.add_argument("--decrypt", action="store_true", help="write plain data, although an input is encrypted")
    parser.add_argument("--force", action="store_true", help="overwrite a target that exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:

    from fst._core import ops
    from fst._core.arguments import DIGESTS_KEY
    from fst._core.encryption_key import EncryptionKey
    from fst._save.parts import BATCH_BYTES, LARGE_BATCH_BYTES
    from fst._save.save import save_parts

    key = None if arguments.encrypt is None else EncryptionKey.from_file(arguments.encrypt)
    _check_target(arguments)
    inputs = Inputs(key, arguments)
    rules = _rules(arguments)
    if rules == ():
        for path in arguments.paths:
            inputs.add(path)
    else:
        inputs.add_outputs(arguments.paths, rules)
    for place, entry in inputs.replaced:
        message = f"its metadata {entry!r} replaces another value of an earlier file"
        print(f"fst: {visible(place)}: {visible(message)}", file=sys.stderr)
    origins = _renamed(inputs.origins, arguments)
    # A pattern may be for one of the files only.
    dtypes = dict(zip(origins, ops.requested_dtypes(list(origins), requested_dtypes(arguments.dtype)), strict=True))
    likes = {name: origin.like(dtypes[name]) for name, origin in origins.items()}
    metadata = inputs.metadata | dict(arguments.metadata or ())
    if arguments.digests == "none":
        metadata.pop(DIGESTS_KEY, None)
        arguments.digests = None
    # Loads of the directory would take an older index. A checkpoint of one shard replaces it.
    replaces_index = arguments.force and _exists(f"{arguments.target}.index.json")
    if arguments.target.endswith(".tensors"):
        _save_tensors(origins, dtypes, arguments, key)
    else:
        save_parts(
            likes,
            inputs.loader(origins, dtypes),
            arguments.target,
            metadata=metadata or None,
            max_shard_bytes=arguments.max_shard_size or (sys.maxsize if replaces_index else None),
            digests=arguments.digests,
            encryption_key=key,
            batch_bytes=LARGE_BATCH_BYTES if any(map(is_remote, arguments.paths)) else BATCH_BYTES,
        )
    size_bytes = sum(like.nbytes for like in likes.values())
    target = without_secrets(arguments.target)
    if arguments.json:
        print(json.dumps({"path": target, "tensors": len(likes), "bytes": size_bytes}, indent=2))
    else:
        print(f"{visible(target)}: {format_count(len(likes), 'tensor')}, {format_size(size_bytes)}")
    return 0


def _rules(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Returns the rules of the recipe. Empty without one, and `None` for `--dequantize`."""
    from fst._recipe.recipe import Recipe

    if arguments.recipe is None:
        return None if arguments.dequantize else ()
    if arguments.dequantize:
        arguments.error("--recipe and --dequantize exclude each other; put dequant(...) into the rules")
    with open(arguments.recipe, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    rules = [line for line in lines if line and not line.startswith("#")]
    if not rules:
        raise ValueError(f"{arguments.recipe}: has no rules; write one a line, such as 'model.{{*n}} = {{*n}}'")
    return Recipe(rules).rules


def _renaming(text: str) -> tuple[str, Callable[[str], str | None]]:
    from fst._recipe.names import renaming

    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW, such as 'model.{{*rest}}={{*rest}}'")
    try:
        return text, renaming(old, new)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _entry(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as format=pt")
    return key, value


def _check_target(arguments: argparse.Namespace) -> None:
    """Raises an error if the target cannot be written, or must not be overwritten."""
    from fst._core import ops

    target = arguments.target
    if not is_url(target) and os.path.isdir(target):
        arguments.error(f"{target}: is a directory; give the path of a file in it, such as {target}/model.safetensors")
    if not target.endswith(_SUFFIXES):
        arguments.error(f"{target}: the name of the target must end in .safetensors or .tensors")
    if is_url(target):
        ops.call("check_target", target)
    else:
        check_output(target)
    for existing in (target, f"{target}.index.json"):
        if not arguments.force and _exists(existing):
            shown = without_secrets(existing)
            raise FileExistsError(errno.EEXIST, f"{shown}: exists; give another target, or overwrite it with --force")


def _exists(path: str) -> bool:
    """Returns whether there is a file or object. It need not be a checkpoint."""
    from fst._checkpoint.checkpoint import OpenCheckpoint

    if not is_url(path):
        return Path(path).exists()
    try:
        OpenCheckpoint(path)
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return True


def _renamed(origins: Mapping[str, Origin], arguments: argparse.Namespace) -> dict[str, Origin]:
    """Returns the tensors to write, by their new names."""
    from fst._recipe.names import check_unique

    dropped = set(select(list(origins), arguments.drop)) if arguments.drop else set()
    kept = [name for name in origins if name not in dropped]
    new_names = {name: name for name in kept}
    used = set()
    for name in kept:
        for text, rename in arguments.rename or ():
            if (new := rename(name)) is not None:
                new_names[name] = new
                used.add(text)
                break
    for text, rename in arguments.rename or ():
        if text not in used and not any(rename(name) is not None for name in kept):
            # Names the nearest name.
            select(kept, [text.partition("=")[0]])
    check_unique(new_names.items())
    return {new: origins[name] for name, new in new_names.items()}


def _save_tensors(
    origins: Mapping[str, Origin],
    dtypes: Mapping[str, torch.dtype | None],
    arguments: argparse.Namespace,
    key: EncryptionKey | None,
) -> None:
    """Writes a file in tensorizer's format, which has no metadata, and hashes of its own, tensor by tensor."""
    options = {
        "--max-shard-size": arguments.max_shard_size,
        "--digests": arguments.digests,
        "--metadata": arguments.metadata,
    }
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{arguments.target}: only safetensors files take {option}; leave it out")
    from fst.compat.tensorizer import TensorSerializer, TensorType

    with TensorSerializer(arguments.target, encryption=key) as serializer:
        for name, origin in origins.items():
            tensor: Tensor = origin.load(dtypes[name])
            serializer.write_tensor(0, name, TensorType.STATE_DICT, tensor)
