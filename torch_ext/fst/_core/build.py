"""Libraries of the package, and the versions that they were built from and for. Needs no PyTorch.

The package has the core, `libfst_core.so`, which loads and saves without PyTorch, and for each supported release of
PyTorch the layer that registers the operators, such as `libfst_torch_2.11.so`.
"""

import mmap
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# Text that csrc/ops.cpp compiles into a layer.
_BUILD_TEXT = re.compile(rb"fst (\S+): built for PyTorch")


def layer_for(torch_version: str, package: Path = PACKAGE) -> Path:
    """Returns the path of the layer for a version of PyTorch, such as "2.11.0+cu130". The file may be missing."""
    return package / f"libfst_torch_{'.'.join(torch_version.split('.')[:2])}.so"


def torch_releases(package: Path = PACKAGE) -> list[str]:
    """Returns the `major.minor` releases of PyTorch for which the package has a layer, the oldest first."""
    names = (path.stem.removeprefix("libfst_torch_") for path in package.glob("libfst_torch_*.so"))
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def read_version(layer: Path) -> str | None:
    """Reads the version of fst in `layer` without running any of its code. Returns None if it does not contain one."""
    with layer.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _BUILD_TEXT.search(content)
        return found[1].decode() if found else None
