"""Builds fst's libraries with cargo: the core once, and the C++ layer for each PyTorch that the package is to serve.

Everything static is in pyproject.toml. What is left for code: the layer calls PyTorch's C++ functions, whose binary
interface changes with every minor release. A build from source serves the PyTorch of the environment that the package
is installed into. `release/build_wheel.py` names several in `FST_TORCH_ROOTS`, directories of their Python packages.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

REFERENCE_TORCH = "2.11.0"


def target_environ() -> dict[str, str]:
    """This process's environment variables without those by which pip hides the target environment's packages."""
    hiding = {"PYTHONPATH", "PYTHONNOUSERSITE"}
    return {name: value for name, value in os.environ.items() if name not in hiding}


def torch_root(environ: dict[str, str]) -> list[Path]:
    """The directory of the PyTorch that this interpreter imports under `environ`, if it has one."""
    query = [sys.executable, "-c", "import torch; print(torch.__path__[0])"]
    answer = subprocess.run(query, env=environ, capture_output=True, text=True)
    return [Path(answer.stdout.rstrip("\n"))] if answer.returncode == 0 else []


def find_torch() -> tuple[dict[str, str], list[Path]]:
    """The environment variables to build under, and the directories of the PyTorch packages to build for.

    An isolated build sees a PyTorch of its own only if it asked for one, and it asks only if the target has none.
    """
    roots = os.environ.get("FST_TORCH_ROOTS")
    if roots:
        return dict(os.environ), [Path(root) for root in roots.split(os.pathsep)]
    for environ in (dict(os.environ), target_environ()):
        found = torch_root(environ)
        if found:
            return environ, found
    return dict(os.environ), []


def release_of(root: Path) -> tuple[int, int]:
    """The minor release of a PyTorch, such as (2, 11)."""
    found = re.search(r"^__version__ = '(\d+)\.(\d+)\.", (root / "version.py").read_text(), re.MULTILINE)
    if found is None:
        raise PlatformError(f"{root / 'version.py'} does not state the release of PyTorch")
    return int(found[1]), int(found[2])


TORCH_ENVIRON, TORCH_ROOTS = find_torch()


def required_torch() -> str:
    """The requirement on PyTorch: all releases from the first to the last that are built for."""
    releases = sorted(map(release_of, TORCH_ROOTS))
    if not releases:
        return f"torch=={REFERENCE_TORCH}"
    (major, first), (_, last) = releases[0], releases[-1]
    if releases != [(major, minor) for minor in range(first, last + 1)]:
        raise PlatformError(f"one wheel serves successive minor releases of PyTorch, not {releases}")
    return f"torch=={major}.{first}.*" if first == last else f"torch>={major}.{first},<{major}.{last + 1}"


def isolated_toolkit() -> dict[str, str]:
    """`CUDA_HOME` with the nvcc that this interpreter sees, which a build for the target's PyTorch may not see.

    It stands behind one in the target environment, and gives way to a `CUDA_HOME` of the user's.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = (Path(root, "cu13") for root in (nvidia and nvidia.submodule_search_locations) or ())
    found = next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)
    return {"CUDA_HOME": str(found)} if found else {}


def path_free(environ: dict[str, str]) -> dict[str, str]:
    """Flags of the compilers, so that libraries do not depend on the directories they are built in, nor name them."""
    cargo_home = Path(environ.get("CARGO_HOME") or Path.home() / ".cargo")
    directories = {cargo_home / "registry" / "src": "crates", Path.cwd(): "fst"}

    def flags(variable: str, option: str) -> str:
        options = (f"{option}={path}={name}" for path, name in directories.items())
        return " ".join([environ.get(variable, ""), *options]).strip()

    return {
        "RUSTFLAGS": flags("RUSTFLAGS", "--remap-path-prefix"),
        "CFLAGS": flags("CFLAGS", "-ffile-prefix-map"),
        "CXXFLAGS": flags("CXXFLAGS", "-ffile-prefix-map"),
    }


class Library(Extension):
    """A library of the package, built by cargo. Setuptools takes it for an extension module.

    Args:
        name: Name of its file in the package, without suffix. A module has no dot in its name, but an underscore.
        output: Name of the file that cargo builds.
        options: Options of cargo.
        environ: Environment variables of the build.
    """

    def __init__(self, name: str, output: str, *options: str, **environ: str) -> None:
        super().__init__(f"fst.{name}", sources=[])
        self.output = output
        self.options = options
        self.environ = environ


def libraries() -> list[Extension]:
    """The core, and the layer for each PyTorch to build for."""
    core = Library("libfst_core", "libfst.so", "--package", "torch-fst", "--features", "bridge")
    options = ("libfst_operators.so", "--package", "fst-operators")
    layers = (
        Library("libfst_torch_{}_{}".format(*release_of(root)), *options, FST_TORCH=str(root)) for root in TORCH_ROOTS
    )
    return [core, *layers]


class CargoBuild(build_ext):
    """Lets cargo build the libraries, and puts them where setuptools expects extensions."""

    def get_ext_filename(self, fullname: str) -> str:
        path = os.path.join(*fullname.split(".")) + ".so"
        return re.sub(r"_(\d+)_(\d+)\.so$", r"_\1.\2.so", path)

    def run(self) -> None:
        if sys.platform != "linux":
            raise PlatformError(f"fst runs on Linux only, and this is {sys.platform}: there, use safetensors")
        if not TORCH_ROOTS:
            raise PlatformError("fst is built for the PyTorch it will run with, and found none: install torch first")
        for tool, remedy in (
            ("cargo", "install Rust"),
            (shlex.split(os.environ.get("CXX", "c++"))[0], "install g++ or name a C++20 compiler in CXX"),
        ):
            if shutil.which(tool) is None:
                raise PlatformError(f"fst is built from source, which needs `{tool}`, and it is not on PATH: {remedy}")
        if self.inplace:
            # A layer works with the core that it is built with, and no other.
            for layer in Path("torch_ext", "fst").glob("libfst_torch_*.so"):
                layer.unlink()
        super().run()

    def build_extension(self, ext: Library) -> None:
        environ = isolated_toolkit() | TORCH_ENVIRON | {"FST_PYTHON": sys.executable} | ext.environ
        environ |= path_free(environ)
        subprocess.run(["cargo", "build", "--release", "--locked", *ext.options], env=environ, check=True)
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(os.environ.get("CARGO_TARGET_DIR", "target"), "release", ext.output), destination)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            # A process that has opened the old file keeps it.
            (Path("torch_ext") / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """No file of the wheel depends on the Python version or its binary interface, only on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


version = re.search(r'^version = "(.+)"$', Path("Cargo.toml").read_text(), re.MULTILINE)
setup(
    version=version.group(1),
    install_requires=[required_torch()],
    # An isolated build then gets a PyTorch of its own, which is also the one the wheel will require.
    setup_requires=[] if TORCH_ROOTS else [f"torch=={REFERENCE_TORCH}"],
    packages=find_packages("torch_ext"),
    package_dir={"": "torch_ext"},
    ext_modules=libraries(),
    cmdclass={"build_ext": CargoBuild, "bdist_wheel": PlatformWheel},
)
