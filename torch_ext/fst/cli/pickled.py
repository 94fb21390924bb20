"""PyTorch files, which `fst convert` reads and the other subcommands do not."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fst._core.files import open_regular

SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
# First bytes of the ZIP archives that torch.save writes, and of the pickles that it wrote before PyTorch 1.6.
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


@contextmanager
def suggests_convert(paths: Sequence[str]) -> Iterator[None]:
    """Names `fst convert` in the error for a path that is not a checkpoint, but a PyTorch file or a directory of some.

    A damaged checkpoint beside PyTorch files keeps its own error.
    """
    try:
        yield
    except (ValueError, IsADirectoryError) as error:
        for path in map(Path, paths):
            found = _pickled_in(path)
            if found:
                target = path / "model.safetensors" if path.is_dir() else path.with_suffix(".safetensors")
                command = shlex.join(["fst", "convert", *map(str, found), str(target)])
                raise ValueError(f"{path}: a PyTorch file, not safetensors; convert it: {command}") from error
        raise


def _pickled_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if is_pickled(path) else []
    if any(path.glob("*.safetensors*")):
        return []
    # Beside these, repositories have files of the optimizer and of the arguments.
    models = sorted(path.glob("pytorch_model*.bin"))
    return models or sorted(filter(is_pickled, path.iterdir()))


def is_pickled(path: Path) -> bool:
    """Returns whether a local file begins as PyTorch files do."""
    try:
        with open_regular(path) as file:
            return file.read(4).startswith(_BEGINNINGS)
    except (OSError, ValueError):
        return False
