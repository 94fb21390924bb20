"""`fst convert`: converts PyTorch files to safetensors, and merges, shards or casts safetensors."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import pickle
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fst._core.files import open_regular
from fst._core.urls import is_url, without_secrets
from fst._profile.formatting import format_count, format_size, visible
from fst.cli.arguments import Paths, check_output, expanded, size
from fst.cli.pickled import files_of, is_pickled
from fst.cli.time import add_dtype, requested_dtypes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fst._checkpoint.checkpoint import OpenCheckpoint
    from fst._core.encryption_key import EncryptionKey


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert PyTorch and tensorizer files to safetensors; merge, shard or cast safetensors",
        description="Reads checkpoints in the formats of safetensors and tensorizer, and PyTorch files (.pt, .pth, "
        ".bin, .ckpt), directories and indices of them, and writes all tensors to one safetensors checkpoint, or to "
        "one .tensors file. PyTorch files are read with weights_only=True, so code in them does not run.",
    )
    parser.add_argument("paths", nargs="+", action=Paths, metavar="PATH")
    parser.add_argument(
        "target",
        type=expanded,
        help="the .safetensors file to write; names of shards and their index derive from it. Or a .tensors file",
    )
    add_dtype(parser)
    parser.add_argument("--key", help='key of the tensors in a PyTorch file, such as "state_dict"')
    parser.add_argument(
        "--tensors-only", action="store_true", help="leave out values of a PyTorch file that are not tensors"
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
    from fst._checkpoint.checkpoint import OpenCheckpoint
    from fst._core import ops
    from fst._core.arguments import DIGESTS_KEY, path_of
    from fst._core.encryption_key import EncryptionKey, check_output_key
    from fst._save.save import save_file

    key = None if arguments.encrypt is None else EncryptionKey.from_file(arguments.encrypt)
    target = Path(arguments.target)
    if is_url(arguments.target):
        arguments.error("the target must be a local path; upload the file, or use fst.save_file, which writes to URLs")
    if target.is_dir():
        arguments.error(f"{target}: is a directory; give the path of a file in it, such as {target}/model.safetensors")
    if target.suffix not in (".safetensors", ".tensors"):
        arguments.error(f"{target}: the name of the target must end in .safetensors or .tensors")
    check_output(arguments.target)
    for existing in (target, Path(f"{target}.index.json")):
        if existing.exists() and not arguments.force:
            raise FileExistsError(
                errno.EEXIST, f"{existing}: exists; give another target, or overwrite it with --force"
            )
    opened: list[tuple[list[str], dict[str, Tensor] | OpenCheckpoint]] = []
    names: set[str] = set()
    metadata: dict[str, str] = {}
    for path in arguments.paths:
        files, listed = files_of(path)
        for file in files:
            content: dict[str, Tensor] | OpenCheckpoint
            if is_pickled(file):
                content = _from_pickle(Path(file), arguments.key, arguments.tensors_only)
                found = list(content)
                metadata.setdefault("format", "pt")
            else:
                content = OpenCheckpoint(file)
                ops.call("check_index", [path_of(file)])
                check_output_key(file if content.is_encrypted() else None, arguments.target, key, arguments.decrypt)
                found = content.names()
                for place, file_metadata in content.metadata():
                    kept = metadata.items() - {(DIGESTS_KEY, metadata.get(DIGESTS_KEY))}
                    for entry in sorted(name for name, value in kept if file_metadata.get(name, value) != value):
                        message = f"its metadata {entry!r} replaces another value of an earlier file"
                        print(f"fst: {visible(place)}: {visible(message)}", file=sys.stderr)
                    metadata |= file_metadata
            if duplicates := names.intersection(found):
                message = f"{min(duplicates)!r} is in an earlier file, too; convert the files one by one"
                raise ValueError(f"{without_secrets(file)}: {message}")
            names.update(found)
            opened.append((found, content))
        if missing := listed - names:
            raise ValueError(f"{path}: no file of the index has {min(missing)!r}; get all files of the model again")
    # A pattern may be for one of the files only.
    ordered = [name for found, _ in opened for name in found]
    dtypes = dict(zip(ordered, ops.requested_dtypes(ordered, requested_dtypes(arguments.dtype)), strict=True))
    tensors: dict[str, Tensor] = {}
    for found, content in opened:
        tensors |= _load(found, content, dtypes)
    if arguments.digests == "none":
        metadata.pop(DIGESTS_KEY, None)
        arguments.digests = None
    if target.suffix == ".tensors":
        _save_tensors(tensors, target, arguments, key)
    else:
        save_file(
            _unshare(tensors),
            target,
            metadata=metadata or None,
            max_shard_bytes=arguments.max_shard_size,
            digests=arguments.digests,
            encryption_key=key,
        )
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if arguments.json:
        print(json.dumps({"path": str(target), "tensors": len(tensors), "bytes": size_bytes}, indent=2))
    else:
        print(f"{visible(target)}: {format_count(len(tensors), 'tensor')}, {format_size(size_bytes)}")
    return 0


def _load(
    names: list[str], content: dict[str, Tensor] | OpenCheckpoint, dtypes: Mapping[str, torch.dtype | None]
) -> dict[str, Tensor]:
    """Returns all tensors of an input. The stored floats of 16 bits and more are cast to their dtypes."""
    import torch

    from fst._core.dtypes import CASTABLE

    if not isinstance(content, dict):
        loaded = content.load_tensors(names, torch.device("cpu"), {name: dtypes[name] for name in names})
        return dict(zip(names, loaded, strict=True))
    return {
        name: tensor.to(dtypes[name]) if dtypes[name] is not None and tensor.dtype in CASTABLE else tensor
        for name, tensor in content.items()
    }


def _save_tensors(
    tensors: dict[str, Tensor], target: Path, arguments: argparse.Namespace, key: EncryptionKey | None
) -> None:
    """Writes a file in tensorizer's format, which has no metadata, and hashes of its own."""
    options = {"--max-shard-size": arguments.max_shard_size, "--digests": arguments.digests}
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{target}: only safetensors files take {option}; leave it out")
    from fst.compat.tensorizer import TensorSerializer, TensorType

    with TensorSerializer(target, encryption=key) as serializer:
        for name, tensor in tensors.items():
            serializer.write_tensor(0, name, TensorType.STATE_DICT, tensor)


def _from_pickle(path: Path, key: str | None, tensors_only: bool) -> dict[str, Tensor]:
    import torch
    from torch.serialization import safe_globals

    try:
        with open_regular(path) as file, safe_globals(_numpy_globals()):
            # Read, not mapped: a file that another process cuts short is an error, and does not end this process.
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and str(path) in str(error):
            raise
        names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
        if any(name.endswith("/constants.pkl") for name in names):
            reason = (
                "this is a TorchScript archive; write its tensors with torch.jit.load(...).state_dict() and torch.save"
            )
        elif names and not any(name.endswith("data.pkl") for name in names):
            from fst._checkpoint.checkpoint import OpenCheckpoint

            # Its error says what the archive is.
            OpenCheckpoint(str(path))
            reason = "this is a ZIP archive of another kind; unpack it"
        else:
            reason = _reason(error)
        raise ValueError(f"{path}: {reason}") from error
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            found = ", ".join(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
            raise KeyError(f"{path}: no entry {key!r}; the file has {found}")
        content = content[key]
    elif isinstance(content, Mapping) and not tensors_only:
        _suggest_key(path, content)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _flatten(path, content, "", tensors_only):
        if name in tensors:
            raise ValueError(f"{path}: two tensors have the name {name!r} once keys are joined with dots; rename one")
        tensors[name] = tensor
    return tensors


def _numpy_globals() -> list[Any]:
    """Returns what creates numbers and arrays of NumPy, if installed, which stand beside the tensors of many files."""
    if importlib.util.find_spec("numpy") is None:
        return []
    import numpy as np

    scalar, rebuild = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    functions = [(scalar, f"{name}.scalar") for name in modules] + [
        (rebuild, f"{name}._reconstruct") for name in modules
    ]
    dtypes = {type(np.dtype(kind)) for kind in np.typecodes["All"] if kind != "O"}
    return [*functions, np.ndarray, np.dtype, *dtypes]


def _reason(error: Exception) -> str:
    """Returns why a PyTorch file was not read. PyTorch's own text recommends to run the code in the file."""
    found = re.search(r"(?i)unsupported (?:global|class|operand)\S* (?:GLOBAL )?([\w.]+)", str(error))
    if found:
        return (
            f"the file holds code ({found[1]}), which does not run here; convert a state dict: "
            "torch.save(model.state_dict(), ...)"
        )
    return f"expected a file that torch.load reads with weights_only=True, such as a state dict: {error}"


def _suggest_key(path: Path, content: Mapping[Any, Any]) -> None:
    """Raises an error that names the likely key, if the content has other data beside the tensors of one key.

    The likely key holds the most bytes of tensors and nothing else.
    """
    sizes: dict[str, int] = {}
    reason: ValueError | None = None
    for key, value in content.items():
        try:
            tensors = list(_flatten(path, value, str(key), tensors_only=False))
        except ValueError as error:
            reason = error
            continue
        if isinstance(key, str) and isinstance(value, Mapping) and tensors:
            sizes[key] = sum(tensor.nbytes for _, tensor in tensors)
    if reason is not None and sizes:
        likely = max(sizes, key=lambda key: sizes[key])
        others = (
            f"; others with tensors only: {', '.join(map(repr, sizes.keys() - {likely}))}" if len(sizes) > 1 else ""
        )
        raise ValueError(f"{reason}; probably --key {shlex.quote(likely)} ({format_size(sizes[likely])}){others}")


def _flatten(path: Path, content: Any, prefix: str, tensors_only: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dictionaries. Their names are the keys, joined with dots."""
    import torch

    if isinstance(content, torch.Tensor):
        if content.layout != torch.strided or content.is_quantized:
            kind = "quantized" if content.is_quantized else "sparse"
            remedy = ".dequantize()" if content.is_quantized else ".to_dense()"
            raise ValueError(f"{path}: tensor {prefix!r} is {kind}; save it with torch.save after {remedy}")
        yield prefix, content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flatten(path, value, f"{prefix}.{key}" if prefix else str(key), tensors_only)
    elif not tensors_only:
        raise ValueError(
            f"{path}: {prefix or 'the content'} is of type {type(content).__name__}, but safetensors holds tensors "
            "only; give the key of the tensors with --key, or leave out other values with --tensors-only"
        )


def _unshare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share storage with an earlier one, because a file holds separate bytes for each name."""
    from fst._core.memory import Memory

    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        Memory.check(name, tensor)
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = Memory.copy(name, tensor) if storage in seen and tensor.numel() else tensor
        seen.add(storage)
    return unshared
