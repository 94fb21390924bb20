"""PyTorch files, which `fst convert` reads."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import shlex
import zipfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fst._core.files import is_index, names_in, open_regular
from fst._core.urls import is_url
from fst._profile.formatting import format_size

if TYPE_CHECKING:
    from torch import Tensor

_INDEX_SUFFIX = ".bin.index.json"
# First bytes of the ZIP archives that torch.save writes, and of the pickles that it wrote before PyTorch 1.6.
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def files_of(path: str) -> tuple[list[str], set[str]]:
    """Returns the files of a directory or index of PyTorch files, and the names of tensors that the index lists.

    A directory stands for its index, or else for the files of the model, which have files of the optimizer and of
    arguments beside them. Any other path stands for itself, as a directory with a safetensors checkpoint does.
    """
    place = Path(path)
    if is_url(path):
        return [path], set()
    names = names_in(place) if place.is_dir() else []
    if place.is_dir() and not any(name.endswith(".safetensors") or is_index(name) for name in names):
        if (place / f"pytorch_model{_INDEX_SUFFIX}").exists():
            return _files_of_index(place / f"pytorch_model{_INDEX_SUFFIX}")
        files = [str(place / name) for name in names if fnmatch(name, "pytorch_model*.bin")]
        return files or [file for name in names if is_pickled(file := str(place / name))] or [path], set()
    return _files_of_index(place) if path.endswith(_INDEX_SUFFIX) else ([path], set())


def _files_of_index(index: Path) -> tuple[list[str], set[str]]:
    try:
        names: dict[str, str] = json.loads(index.read_text("utf-8-sig"))["weight_map"]
        files = {index.parent / file for file in names.values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = 'expected an index, a JSON object with an object "weight_map" of tensor names to file names'
        raise ValueError(f"{index}: {message}") from error
    if outside := [file for file in files if file.parent != index.parent]:
        raise ValueError(f"{index}: {min(outside)} is not in the directory of the index")
    return sorted(map(str, files)), set(names)


def is_pickled(path: str | Path) -> bool:
    """Returns whether a local file begins as PyTorch files do."""
    try:
        with open_regular(path) as file:
            return file.read(4).startswith(_BEGINNINGS)
    except (OSError, ValueError):
        return False


def read_pickled(path: Path, key: str | None, tensors_only: bool) -> dict[str, Tensor]:
    """Reads the tensors of a PyTorch file, with `weights_only=True`. `key` is the entry that has them."""
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
