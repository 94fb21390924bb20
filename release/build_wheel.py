"""Builds one wheel for all supported releases of PyTorch: python release/build_wheel.py DIRECTORY [--base ENVIRONMENT]

The wheel has the core once, and the layer for each release. Its tag names the oldest glibc that it runs with. Debug
information goes to DIRECTORY/debug, where `add-symbol-file` of gdb and `perf --symfs` can use it.

Cargo's `CARGO_BUILD_TARGET` selects another processor, as `make wheel-arm` does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from releases import CHECKOUT, PROCESSOR, RELEASES
from reproducible import flags
from torch_headers import torch_headers

# Larger wheels would have something in them by mistake.
WHEEL_BYTES_MAX = 20 << 20
# Time of files in a wheel that is built without git: 1980, before which zip files have no times.
EARLIEST = "315532800"


def main() -> None:
    """Builds the wheel and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the wheel is written")
    parser.add_argument("--base", type=Path, help="an environment with the PyTorch to build for, instead of all")
    arguments = parser.parse_args()
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        built = build(Path(temporary, "built"), torch_roots(arguments.base))
        stripped = strip(built, Path(temporary, "stripped"), directory / "debug")
        wheel = tag(stripped, directory)
    size = wheel.stat().st_size
    if size > WHEEL_BYTES_MAX:
        sys.exit(f"{wheel} has {size} bytes, and at most {WHEEL_BYTES_MAX} are expected")
    run("twine", "check", "--strict", wheel)
    print(wheel)


def torch_roots(base: Path | None) -> list[Path]:
    """Returns the directories of the PyTorch packages to build for."""
    if base is None:
        return [torch_headers(release) for release in RELEASES]
    return list(base.absolute().glob("lib/python*/site-packages/torch"))


def build(directory: Path, roots: list[Path]) -> Path:
    """Builds a wheel for PyTorch packages into `directory`. Returns its path."""
    # setuptools adds files of earlier builds to a wheel.
    shutil.rmtree(CHECKOUT / "build", ignore_errors=True)
    command = ("pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    environ = flags(os.environ) | {"FST_TORCH_ROOTS": os.pathsep.join(map(str, roots))}
    run(*command, "--wheel-dir", directory, CHECKOUT, **environ)
    return only(directory)


def strip(wheel: Path, directory: Path, debug: Path) -> Path:
    """Copies a wheel into `directory` with stripped libraries, and what is stripped off into `debug`."""
    unpacked = directory / "unpacked"
    run("wheel", "unpack", "--dest", unpacked, wheel)
    debug.mkdir(exist_ok=True)
    for library in sorted(unpacked.glob("*/fst/libfst_*.so")):
        symbols = debug / f"{library.name}.debug"
        tool("objcopy", "--only-keep-debug", library, symbols)
        tool("strip", "--strip-unneeded", library)
        tool("objcopy", f"--add-gnu-debuglink={symbols}", library)
    packed = directory / "packed"
    packed.mkdir()
    run("wheel", "pack", "--dest-dir", packed, only(unpacked), SOURCE_DATE_EPOCH=commit_time())
    return only(packed)


def tag(wheel: Path, directory: Path) -> Path:
    """Copies a wheel into `directory` with the name of the oldest platform that it runs on. Returns its path.

    Libraries that are not part of a platform are refused, except PyTorch's.
    """
    for old in directory.glob("*.whl"):
        old.unlink()
    excluded = [f"--exclude={name}" for name in ("libtorch*.so", "libc10.so")]
    options = ["--only-plat", *excluded, "--wheel-dir", str(directory)]
    run("auditwheel", "repair", *options, wheel, SOURCE_DATE_EPOCH=commit_time())
    [tagged] = directory.glob("*.whl")
    return tagged


def run(module: str, *arguments: str | Path, **environ: str) -> None:
    """Runs a Python program."""
    subprocess.run([sys.executable, "-m", module, *arguments], env=os.environ | environ, check=True)


def commit_time() -> str:
    """Returns the time that files in archives have, so that builds of one commit are equal."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else EARLIEST


def tool(name: str, *arguments: str | Path) -> None:
    """Runs a program of binutils for the processor."""
    subprocess.run([f"{PROCESSOR}-linux-gnu-{name}" if PROCESSOR else name, *arguments], check=True)


def only(directory: Path) -> Path:
    """Returns the only entry of a directory."""
    [path] = directory.iterdir()
    return path


if __name__ == "__main__":
    main()
