"""Tests a wheel with releases of PyTorch: python release/check_wheel.py WHEEL [--torch RELEASE]... [--base DIRECTORY]

Each release has an environment of its own, which is removed before the next. The tests run from a neutral directory,
where only the installed wheel can be imported. What depends on the release are the operators, graphs and C++ programs.
`--packaging` runs only what depends on the build of the libraries and on the wheel. It leaves out the C++ programs: the
tests of the checkout build them with the same PyTorch, and the programs of another release with a wheel.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from releases import CHECKOUT, RELEASES

# Of tests/python.
PACKAGING = (
    "core/test_library.py",
    "core/test_package.py",
    "kernels/test_image.py",
    "load/test_load.py",
    "project/test_versions.py",
)
TESTS = (
    "core",
    "kernels/test_image.py",
    "load/test_load.py",
    "load/test_load_into.py",
    "save/test_save_op.py",
    "project/test_versions.py",
)


def main() -> None:
    """Tests the wheel. Ends with an error if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", action="append", metavar="RELEASE", help="2.11, say; by default all, one by one")
    parser.add_argument("--base", type=Path, help="an environment with PyTorch and the packages of the tests, to use")
    parser.add_argument("--packaging", action="store_true", help="only the tests of the wheel itself")
    arguments = parser.parse_args()
    wheel = arguments.wheel.absolute()
    tests = PACKAGING if arguments.packaging else TESTS
    if arguments.base:
        check_with_base(wheel, arguments.base.absolute(), tests)
    else:
        for release in arguments.torch or RELEASES:
            check_with_release(wheel, release, tests)


def check_with_release(wheel: Path, release: str, tests: tuple[str, ...]) -> None:
    """Tests a wheel in a new environment with the last patch of a release of PyTorch."""
    with tempfile.TemporaryDirectory() as temporary:
        python = create(Path(temporary, "environment"))
        requirements = ("-r", str(CHECKOUT / "requirements" / "test.txt"))
        install(python, f"torch=={release}.*", *requirements, str(wheel))
        test(python, Path(temporary), os.environ["PATH"], tests)


def check_with_base(wheel: Path, base: Path, tests: tuple[str, ...]) -> None:
    """Tests a wheel in a new environment that has the packages of another one, too."""
    with tempfile.TemporaryDirectory() as temporary:
        python = create(Path(temporary, "environment"))
        [site] = base.glob("lib/python*/site-packages")
        own = python.parents[1] / site.relative_to(base)
        (own / "base.pth").write_text(f"import site; site.addsitedir({str(site)!r})\n")
        install(python, "--no-deps", str(wheel))
        test(python, Path(temporary), f"{base / 'bin'}{os.pathsep}{os.environ['PATH']}", tests)


def create(environment: Path) -> Path:
    """Creates an environment. Returns its interpreter."""
    venv.create(environment, with_pip=True)
    return environment / "bin" / "python"


def install(python: Path, *arguments: str) -> None:
    """Installs packages. `--no-cache-dir`, because a PyTorch takes 3 GB, and is installed only once."""
    options = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
    subprocess.run([python, "-m", "pip", "install", *options, *arguments], env=neutral_environ(), check=True)


def neutral_environ() -> dict[str, str]:
    """Returns the environment variables of this process without those that show packages of the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def test(python: Path, directory: Path, path: str, tests: tuple[str, ...]) -> None:
    """Runs the tests in `directory`."""
    environ = neutral_environ() | {"PATH": f"{python.parent}{os.pathsep}{path}"}
    subprocess.run([python, "-m", "fst", "--version"], cwd=directory, env=environ, check=True)
    paths = [str(CHECKOUT / "tests" / "python" / name) for name in tests]
    options = ["--numprocesses=auto", "--dist=loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    options += [f"--rootdir={CHECKOUT}", "-c", str(CHECKOUT / "pyproject.toml")]
    done = subprocess.run([python, "-m", "pytest", *options, *paths], cwd=directory, env=environ)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
