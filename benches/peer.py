"""The libraries that are compared, and an environment of its own for each.

    python benches/peer.py

installs the pinned releases under .venv-bench/, one directory each, which the bench puts in
front of the Python path of that peer's processes. PyTorch is shared, so that all of them are
measured with the same one.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loader import (
    Fastsafetensors,
    Fst,
    Loader,
    RunaiStreamer,
    Safetensors,
    SafetensorsPread,
    SafetensorsPrefetch,
    UnsupportedError,
)

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / ".venv-bench"

# OpenMP threads that spin while they wait for each other take the cores from whoever they wait
# for. On a machine that does anything else, that made the same sum up to sixty times slower.
CALM_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Release:
    """A package at one version, with what it needs beside PyTorch and NumPy."""

    package: str
    version: str
    needs: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        return ENVIRONMENTS / f"{self.package}-{self.version}"

    def install(self, python_version: str | None) -> None:
        """Installs it into its directory, for this interpreter or for wheels of `python_version`."""
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        wheels = ["--only-binary=:all:", f"--python-version={python_version}"] if python_version else []
        packages = [f"{self.package}=={self.version}", *self.needs]
        subprocess.run([*pip, "--no-deps", f"--target={self.directory}", *wheels, *packages], check=True)


SAFETENSORS = Release("safetensors", "0.8.0")
SAFETENSORS_NEXT = Release("safetensors", "0.9.0rc1")
FASTSAFETENSORS = Release("fastsafetensors", "0.5.0")
RUNAI_STREAMER = Release("runai-model-streamer", "0.17.0", needs=("humanize==4.17.0",))


@dataclass(frozen=True)
class Peer:
    """One column of the tables: a release, the loader that uses it, and settings from the environment."""

    name: str
    loader: Callable[[], Loader]
    release: Release | None = None  # None is this repository's own library
    variant: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        library = f"{self.release.package} {self.release.version}" if self.release else "fst"
        return f"{library}, {self.variant}" if self.variant else library

    def environment(self) -> dict[str, str]:
        """The environment of a process that measures this peer, free of settings made by hand."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("FST_", "FASTSAFETENSORS_"))
        }
        # An installed fst is used as it is; the one in the source tree comes first once it is built.
        source = REPOSITORY / "torch_ext"
        own = [source] if (source / "fst" / "libfst.so").exists() else []
        first = [self.release.directory] if self.release else own
        path = [str(directory) for directory in first] + [inherited.get("PYTHONPATH", "")]
        return inherited | CALM_THREADS | dict(self.settings) | {"PYTHONPATH": os.pathsep.join(filter(None, path))}

    def open(self) -> Loader:
        """Imports the library; raises UnsupportedError where its release is not the one to be measured."""
        if self.release:
            found = self.version()
            if found != self.release.version:
                raise UnsupportedError(f"{self.release.package} {self.release.version} is not installed, found {found}")
        return self.loader()

    def version(self) -> str:
        package = self.release.package if self.release else "fst"
        try:
            return version(package)
        except PackageNotFoundError:
            return "none" if self.release else "source tree"


_PEERS = (
    Peer("fst", Fst),
    Peer("fst-pread", Fst, None, "pread", {"FST_READER": "pread"}),
    Peer("safetensors", Safetensors, SAFETENSORS),
    Peer("safetensors-pread", SafetensorsPread, SAFETENSORS, "pread"),
    Peer("safetensors-rc", Safetensors, SAFETENSORS_NEXT),
    Peer("safetensors-rc-prefetch", SafetensorsPrefetch, SAFETENSORS_NEXT, "prefetch"),
    Peer("fastsafetensors", Fastsafetensors, FASTSAFETENSORS),
    Peer("fastsafetensors-buffered", Fastsafetensors, FASTSAFETENSORS, "buffered", {"FASTSAFETENSORS_ODIRECT": "0"}),
    Peer("runai-streamer", RunaiStreamer, RUNAI_STREAMER),
)
PEERS = {peer.name: peer for peer in _PEERS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs the libraries that fst is compared with.")
    parser.add_argument("--python-version", help="fetch wheels for another Python, such as 3.12, to carry elsewhere")
    python_version = parser.parse_args().python_version
    for release in dict.fromkeys(peer.release for peer in PEERS.values() if peer.release):
        if not release.directory.exists():
            print(f"installing {release.package} {release.version}", flush=True)
            release.install(python_version)


if __name__ == "__main__":
    main()
