"""Builds libfst.so with cargo for the PyTorch of the environment that the package is installed into.

Everything static is in pyproject.toml. What is left for code: the library calls PyTorch's C++ functions, whose
binary interface changes with every release, so one wheel serves exactly one PyTorch version and any Python.
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


def torch_release(environ: dict[str, str]) -> str | None:
    """The `major.minor.patch` of the PyTorch that this interpreter imports under `environ`, or None without one."""
    query = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    answer = subprocess.run(query, env=environ, capture_output=True, text=True)
    found = re.match(r"\d+\.\d+\.\d+", answer.stdout)
    return found.group() if answer.returncode == 0 and found else None


def find_torch() -> tuple[dict[str, str], str | None]:
    """The environment variables under which this interpreter imports the PyTorch to build for, and its release.

    An isolated build sees a PyTorch of its own only if it asked for one, and it asks only if the target has none.
    """
    for environ in (dict(os.environ), target_environ()):
        release = torch_release(environ)
        if release:
            return environ, release
    return dict(os.environ), None


TORCH_ENVIRON, TORCH_RELEASE = find_torch()


def isolated_toolkit() -> dict[str, str]:
    """`CUDA_HOME` with the nvcc that this interpreter sees, which a build for the target's PyTorch may not see.

    It stands behind one in the target environment, and gives way to a `CUDA_HOME` of the user's.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = (Path(root, "cu13") for root in (nvidia and nvidia.submodule_search_locations) or ())
    found = next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)
    return {"CUDA_HOME": str(found)} if found else {}


class CargoBuild(build_ext):
    """Lets cargo build the library, and puts it where setuptools expects the extension."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if sys.platform != "linux":
            raise PlatformError(f"fst runs on Linux only, and this is {sys.platform}: there, use safetensors")
        if TORCH_RELEASE is None:
            raise PlatformError("fst is built for the PyTorch it will run with, and found none: install torch first")
        for tool, remedy in (
            ("cargo", "install Rust"),
            (shlex.split(os.environ.get("CXX", "c++"))[0], "install g++ or name a C++20 compiler in CXX"),
        ):
            if shutil.which(tool) is None:
                raise PlatformError(f"fst is built from source, which needs `{tool}`, and it is not on PATH: {remedy}")
        environ = isolated_toolkit() | TORCH_ENVIRON | {"FST_PYTHON": sys.executable}
        subprocess.run(["cargo", "build", "--release", "--locked", "--features", "torch"], env=environ, check=True)
        library = Path(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "libfst.so")
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, destination)


class PlatformWheel(bdist_wheel):
    """No file of the wheel depends on the Python version or its binary interface, only on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


version = re.search(r'^version = "(.+)"$', Path("Cargo.toml").read_text(), re.MULTILINE)
setup(
    version=version.group(1),
    install_requires=[f"torch=={TORCH_RELEASE or REFERENCE_TORCH}"],
    # An isolated build then gets a PyTorch of its own, which is also the one the wheel will require.
    setup_requires=[] if TORCH_RELEASE else [f"torch=={REFERENCE_TORCH}"],
    packages=find_packages("torch_ext"),
    package_dir={"": "torch_ext"},
    ext_modules=[Extension("fst.libfst", sources=[])],
    cmdclass={"build_ext": CargoBuild, "bdist_wheel": PlatformWheel},
)
