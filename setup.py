"""Builds fst's libraries with cargo: the core, and the C++ layer for each PyTorch that the package is to serve.

Everything static is in pyproject.toml. What is left for code: the layer calls PyTorch's C++ functions, whose binary
interface changes with every minor release. A build from source serves the PyTorch of the environment that the package
is installed into. `release/build_wheel.py` names several in `FST_TORCH_ROOTS`, directories of their Python packages.
`FST_PROFILE` is the profile of cargo, `release` by default. `dev` compiles a changed line in seconds, and checks for
overflows. Cargo's `CARGO_BUILD_TARGET` selects another processor, such as aarch64-unknown-linux-gnu.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

REFERENCE_TORCH = "2.11.0"
# Platform that the libraries run on, if it differs from this interpreter's. Cargo has a directory for it.
TARGET = os.environ.get("CARGO_BUILD_TARGET", "")


def target_environ() -> dict[str, str]:
    """This process's environment variables without those by which pip hides the target environment's packages."""
    hiding = {"PYTHONPATH", "PYTHONNOUSERSITE"}
    return {name: value for name, value in os.environ.items() if name not in hiding}


def isolated_toolkit() -> dict[str, str]:
    """`CUDA_HOME` with the nvcc that this interpreter sees, which a build for the target's PyTorch may not see.

    It stands behind one in the target environment, and gives way to a `CUDA_HOME` of the user's.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = (Path(root, "cu13") for root in (nvidia and nvidia.submodule_search_locations) or ())
    found = next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)
    return {"CUDA_HOME": str(found)} if found else {}


def torch_root(environ: dict[str, str]) -> list[Path]:
    """The directory of the PyTorch that this interpreter imports under `environ`, if it has one."""
    # Importing PyTorch would take seconds.
    script = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    query = [sys.executable, "-c", script]
    answer = subprocess.run(query, env=environ, capture_output=True, text=True)
    return [Path(answer.stdout.rstrip("\n"))] if answer.returncode == 0 else []


def find_torch() -> tuple[dict[str, str], list[Path]]:
    """The environment variables to build under, and the directories of the PyTorch packages to build for.

    An isolated build sees a PyTorch of its own only if it asked for one, and it asks only if the target has none.
    """
    roots = os.environ.get("FST_TORCH_ROOTS")
    if roots:
        return dict(os.environ), [Path(root) for root in roots.split(os.pathsep)]
    for environ in (dict(os.environ), isolated_toolkit() | target_environ()):
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


class Library(Extension):
    """A library of the package, built by cargo. Setuptools takes it for an extension module.

    Args:
        name: Name of its file in the package, without suffix. A module has no dot in its name, but an underscore.
        output: Name of the file that cargo builds.
        root: The PyTorch to build the layer for. Cargo builds the core for all of them once.
    """

    def __init__(self, name: str, output: str, root: Path) -> None:
        super().__init__(f"fst.{name}", sources=[])
        self.output = output
        self.root = root


def libraries() -> list[Extension]:
    """The core, and the layer for each PyTorch to build for."""
    layers = [
        Library("libfst_torch_{}_{}".format(*release_of(root)), "libfst_operators.so", root) for root in TORCH_ROOTS
    ]
    return [Library("libfst_core", "libfst.so", root) for root in TORCH_ROOTS[:1]] + layers


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
        environ = TORCH_ENVIRON | {"FST_PYTHON": sys.executable, "FST_TORCH": str(ext.root)}
        profile = os.environ.get("FST_PROFILE", "release")
        features = "bridge,development" if profile == "dev" else "bridge"
        # Both packages at once: the compiler of C++ works beside Rust's.
        packages = ("--package", "torch-fst", "--features", features, "--package", "fst-operators")
        subprocess.run(["cargo", "build", "--profile", profile, "--locked", *packages], env=environ, check=True)
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Cargo has a directory for each profile, of which `dev` is called `debug`.
        directory = "debug" if profile == "dev" else profile
        built = Path(os.environ.get("CARGO_TARGET_DIR", "target"), TARGET, directory, ext.output)
        shutil.copyfile(built, destination)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            # A process that has opened the old file keeps it.
            (Path("torch_ext") / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


def page(readme: str) -> str:
    """Returns the text of the package's page: the README without images and links of files in the repository."""
    local = r"\((?!https?:)[^)]*\)"
    without_images = re.sub(rf"^!\[[^\]]*\]{local}\n+", "", readme, flags=re.MULTILINE)
    return re.sub(rf"\[([^\]]*)\]{local}", r"\1", without_images)


def project_urls(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the addresses of the repository whose workflow builds the package. A build elsewhere has none."""
    repository = environ.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    source = f"{environ['GITHUB_SERVER_URL']}/{repository}"
    owner, _, name = repository.partition("/")
    return {
        "Source": source,
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }


class PlatformWheel(bdist_wheel):
    """No file of the wheel depends on the Python version or its binary interface, only on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", f"linux_{TARGET.partition('-')[0]}" if TARGET else super().get_tag()[2]


version = re.search(r'^version = "(.+)"$', Path("Cargo.toml").read_text(), re.MULTILINE)
setup(
    version=version.group(1),
    long_description=page(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=project_urls(os.environ),
    install_requires=[required_torch()],
    # An isolated build then gets a PyTorch of its own, which is also the one the wheel will require.
    setup_requires=[] if TORCH_ROOTS else [f"torch=={REFERENCE_TORCH}"],
    packages=find_packages("torch_ext"),
    py_modules=["fst_command"],
    package_dir={"": "torch_ext"},
    ext_modules=libraries(),
    cmdclass={"build_ext": CargoBuild, "bdist_wheel": PlatformWheel},
)
