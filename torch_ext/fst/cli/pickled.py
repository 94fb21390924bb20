"""PyTorch files, which `fst convert` reads."""

import json
from pathlib import Path

from fst._core.files import open_regular
from fst._core.urls import is_url

_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
_INDEX_SUFFIX = ".bin.index.json"
# First bytes of the ZIP archives that torch.save writes, and of the pickles that it wrote before PyTorch 1.6.
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def pytorch_files(path: str) -> tuple[list[str], set[str]]:
    """Returns the PyTorch files that a path stands for, and the names of tensors that an index lists.

    A directory stands for its index, or else for the files of the model, which have files of the optimizer and of
    arguments beside them. There are no files for a URL, and none for a directory with a safetensors checkpoint.
    """
    place = Path(path)
    if is_url(path):
        return [], set()
    if place.is_dir():
        if any(place.glob("*.safetensors*")):
            return [], set()
        if (place / f"pytorch_model{_INDEX_SUFFIX}").exists():
            return _files_of_index(place / f"pytorch_model{_INDEX_SUFFIX}")
        files = sorted(place.glob("pytorch_model*.bin")) or sorted(filter(_is_pickled, place.iterdir()))
        return list(map(str, files)), set()
    if place.name.endswith(_INDEX_SUFFIX):
        return _files_of_index(place)
    return [path] if place.suffix in _SUFFIXES or _is_pickled(place) else [], set()


def _files_of_index(index: Path) -> tuple[list[str], set[str]]:
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {index.parent / file for file in names.values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = 'expected an index, a JSON object with an object "weight_map" of tensor names to file names'
        raise ValueError(f"{index}: {message}") from error
    if outside := [file for file in files if file.parent != index.parent]:
        raise ValueError(f"{index}: {min(outside)} is not in the directory of the index")
    return sorted(map(str, files)), set(names)


def _is_pickled(path: Path) -> bool:
    """Returns whether a local file begins as PyTorch files do."""
    try:
        with open_regular(path) as file:
            return file.read(4).startswith(_BEGINNINGS)
    except (OSError, ValueError):
        return False
