"""Gets the headers of a PyTorch release, which are all that a build for it needs, from its wheel."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from releases import CHECKOUT, PROCESSOR, TARGET


def torch_headers(release: str) -> Path:
    """Returns a directory with the headers and `version.py` of the first patch of a `major.minor` release.

    What is built with them runs with later patches. The directory is kept in cargo's target directory.
    """
    folder = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target"), TARGET, "torch", release).absolute()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            unpacked = Path(temporary, "unpacked")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            platform = [f"--platform=manylinux_2_28_{PROCESSOR}"] if PROCESSOR else []
            options = [*platform, "--only-binary=:all:", "--dest", temporary]
            subprocess.run([*pip, *options, f"torch=={release}.0"], check=True)
            [wheel] = Path(temporary).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as file:
                wanted = ("torch/include/", "torch/version.py")
                file.extractall(unpacked, [name for name in file.namelist() if name.startswith(wanted)])
            # A directory with this name is complete.
            unpacked.rename(folder)
    return folder / "torch"
