"""PyTorch files, which `fst convert` reads."""

import json
from fnmatch import fnmatch
from pathlib import Path

from fst._core.files import is_index, names_in, open_regular
from fst._core.urls import is_url

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
