"""Temporary environments on top of the current one, so that there is one PyTorch only."""

import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path


def create(folder: Path) -> Path:
    """Creates an environment that also has the packages of this one. Returns its Python."""
    venv.create(folder, system_site_packages=True)
    # `system_site_packages` means those of the system, and not of the environment that runs this script.
    (site_packages(folder) / "base.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """Returns the folder of the packages of an environment alone."""
    [own] = (folder / "lib").glob("python*/site-packages")
    return own


def install(python: Path, *requirements: str, keep: Callable[[str], bool] = lambda name: True) -> None:
    """Installs packages. Packages that are installed already, and whose names are to be kept, stay."""
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=False)
    if frozen.returncode:
        frozen = subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    lines = [line for line in frozen.stdout.splitlines() if "==" in line and keep(line.split("==")[0])]
    pinned = python.parents[1] / "pinned.txt"
    pinned.write_text("".join(line + "\n" for line in lines))
    pip("--python", python, "install", "--constraint", pinned, *requirements)


def install_release(python: Path, release: str) -> None:
    """Installs a release, without an uninstallation of another one and without requirements."""
    pip("--python", python, "install", "--no-deps", "--ignore-installed", release)


def pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True)
