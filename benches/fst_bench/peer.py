"""Libraries that are compared, with a separate environment for each.

    python -m fst_bench.peer --python-version 3.12

installs the pinned releases, one directory each. The benchmarks put that directory first on the Python path of the
peer's processes. PyTorch is shared, so that all peers are measured with the same release. The benchmarks install
missing releases themselves; the command serves to fetch wheels for a machine without network.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .child import settings
from .directories import ENVIRONMENTS, PACKAGE
from .loaders.base import Loader
from .loaders.fastsafetensors import Fastsafetensors
from .loaders.fst import Fst, FstInto
from .loaders.obstore import Obstore, ObstoreRanges
from .loaders.safetensors import Safetensors, SafetensorsCopied, SafetensorsFlushed, SafetensorsPrefetch
from .loaders.streams import InstantTensor, RunaiStreamer
from .loaders.tensorizer import FstTensors, Tensorizer
from .loaders.verified import FstDigests, FstEncrypted, FstManifest, FstSignature, ModelSigningFirst, Sha256sumFirst
from .unsupported import UnsupportedError

OPTION_PREFIXES = ("FST_", "FASTSAFETENSORS_", "INSTANTTENSOR_", "RUNAI_STREAMER_", "AWS_", "HF_")


LOADS = ("load", "cast", "slice", "select")
ACTIONS = (*LOADS, "columns", "pretrained", "verified", "save", "sharded")


@dataclass(frozen=True)
class Release:
    """Package at a pinned version. `requirements/PACKAGE.txt` has its requirements other than PyTorch and NumPy."""

    package: str
    version: str

    @property
    def directory(self) -> Path:
        return ENVIRONMENTS / f"{self.package}-{self.version}"

    def install(self, python_version: str | None = None) -> None:
        """Installs the release into its directory, for this interpreter or as wheels for `python_version`.

        Raises:
            subprocess.CalledProcessError: pip failed. Its output went to stderr.
        """
        partial = self.directory.with_name(f"{self.directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        wheels = ["--only-binary=:all:", f"--python-version={python_version}"] if python_version else []
        requirements = PACKAGE / "requirements" / f"{self.package}.txt"
        packages = [f"{self.package}=={self.version}", *([f"-r{requirements}"] if requirements.exists() else [])]
        subprocess.run([*pip, "--no-deps", f"--target={partial}", *wheels, *packages], check=True)
        partial.rename(self.directory)


SAFETENSORS = Release("safetensors", "0.8.0")
SAFETENSORS_NEXT = Release("safetensors", "0.9.0rc1")
FASTSAFETENSORS = Release("fastsafetensors", "0.5.0")
INSTANTTENSOR = Release("instanttensor", "0.2.2")
RUNAI_STREAMER = Release("runai-model-streamer", "0.17.0")
# Its name differs from RUNAI_STREAMER, so that installed environments of both are told apart.
RUNAI_STREAMER_S3 = Release("runai-model-streamer-s3", "0.17.0")
OBSTORE = Release("obstore", "0.12.1")
TENSORIZER = Release("tensorizer", "2.12.1")
MODEL_SIGNING = Release("model-signing", "1.1.1")


@dataclass(frozen=True)
class Peer:
    """Row of the tables: a release, the loader that uses it, and environment variables.

    `actions` lists the measured actions on files: a variant that differs in one action only is not measured in the
    others. `suffix` ends the names of converted files, for a peer that does not read the files of
    the workload. `schemes` lists the beginnings of the URLs that it loads, in the benchmarks of remote checkpoints.
    """

    name: str
    loader: Callable[[], Loader]
    release: Release | None = None  # None for fst
    variant: str = ""
    actions: tuple[str, ...] = LOADS
    settings: Mapping[str, str] = field(default_factory=dict)
    schemes: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def title(self) -> str:
        library = f"{self.release.package} {self.release.version}" if self.release else "fst"
        return f"{library}, {self.variant}" if self.variant else library

    def environment(self) -> dict[str, str]:
        """Returns the environment of a process that measures this peer, without the user's settings."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OPTION_PREFIXES)}
        first = [self.release.directory] if self.release else own_directory()
        path = [*map(str, first), inherited.get("PYTHONPATH", ""), str(PACKAGE.parent)]
        return inherited | settings() | dict(self.settings) | {"PYTHONPATH": os.pathsep.join(filter(None, path))}

    def open(self) -> Loader:
        """Imports the library. Raises UnsupportedError if its release is not the pinned one."""
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


# The server has no names for buckets.
PATH_STYLE = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}

VERIFIED = ("verified",)
SHARDED = ("sharded",)
BLAKE3_SUFFIX = ".blake3.safetensors"
# Files of tensorizer, and encrypted ones.
TENSORS_SUFFIX, SECRET_SUFFIX = ".tensors", ".secret.tensors"
# The defaults bypass the page cache.
BUFFERED = {"FASTSAFETENSORS_ODIRECT": "0", "INSTANTTENSOR_BACKEND": "BUFFERED"}

exchange = partial(Fst, "exchange")
digests = partial(FstDigests, "blake3")
digests_exchange = partial(FstDigests, "blake3", "exchange")
digests_sha256 = partial(FstDigests, "sha256")
eight_readers = partial(Tensorizer, num_readers=8)
fst_hashes = partial(FstTensors, verify_hash=True)
fst_secret = partial(FstTensors, encrypted=True)
hashes = partial(Tensorizer, verify_hash=True)
secret = partial(Tensorizer, encrypted=True)

_PEERS = (
    Peer("fst", Fst, None, "", ACTIONS, schemes=("http", "s3")),
    Peer("fst-pread", Fst, None, "pread", (*LOADS, *VERIFIED), settings={"FST_READER": "pread"}),
    Peer("fst-into", FstInto, None, "into existing tensors", (), schemes=("http", "s3")),
    Peer("fst-exchange", exchange, None, "exchange", SHARDED),
    Peer("safetensors", Safetensors, SAFETENSORS, "", ACTIONS),
    Peer("safetensors-copied", SafetensorsCopied, SAFETENSORS, "parts of rows copied", SHARDED),
    Peer("safetensors-flushed", SafetensorsFlushed, SAFETENSORS, "flushed to the disk", ("save",)),
    Peer("safetensors-rc", Safetensors, SAFETENSORS_NEXT),
    Peer("safetensors-rc-prefetch", SafetensorsPrefetch, SAFETENSORS_NEXT, "prefetch"),
    Peer("fastsafetensors", Fastsafetensors, FASTSAFETENSORS, "", (*LOADS, *SHARDED)),
    Peer("fastsafetensors-buffered", Fastsafetensors, FASTSAFETENSORS, "buffered", (*LOADS, *SHARDED), BUFFERED),
    Peer("instanttensor", InstantTensor, INSTANTTENSOR),
    Peer("instanttensor-buffered", InstantTensor, INSTANTTENSOR, "buffered", settings=BUFFERED),
    Peer("runai-streamer", RunaiStreamer, RUNAI_STREAMER),
    Peer("tensorizer", Tensorizer, TENSORIZER, "", (*LOADS, *VERIFIED), schemes=("http",), suffix=TENSORS_SUFFIX),
    Peer("tensorizer-8", eight_readers, TENSORIZER, "num_readers=8", VERIFIED, {}, ("http",), TENSORS_SUFFIX),
    Peer("obstore", Obstore, OBSTORE, actions=(), schemes=("http", "s3")),
    Peer("obstore-ranges", ObstoreRanges, OBSTORE, "get_ranges", (), schemes=("http", "s3")),
    Peer("runai-streamer-s3", RunaiStreamer, RUNAI_STREAMER_S3, "", (), PATH_STYLE, ("s3",)),
    Peer("fst-blake3", digests, None, "digests, BLAKE3", (*VERIFIED, *SHARDED), suffix=BLAKE3_SUFFIX),
    Peer("fst-blake3-exchange", digests_exchange, None, "exchange, digests, BLAKE3", SHARDED, suffix=BLAKE3_SUFFIX),
    Peer("fst-sha256", digests_sha256, None, "digests, SHA-256", VERIFIED, suffix=".sha256.safetensors"),
    Peer("fst-manifest", FstManifest, None, "manifest, SHA-256", VERIFIED, suffix=".sha256"),
    Peer("sha256sum-first", Sha256sumFirst, SAFETENSORS, "sha256sum first", VERIFIED, suffix=".sha256"),
    Peer("fst-signature", FstSignature, None, "signature, SHA-256", VERIFIED, suffix=".sig"),
    Peer("model-signing-first", ModelSigningFirst, MODEL_SIGNING, "then safetensors", VERIFIED, suffix=".sig"),
    Peer("fst-encrypted", FstEncrypted, None, "encrypted", VERIFIED, suffix=".encrypted.safetensors"),
    Peer("fst-tensors", FstTensors, None, ".tensors", VERIFIED, suffix=TENSORS_SUFFIX),
    Peer("fst-tensors-hashes", fst_hashes, None, ".tensors, verify_hash", VERIFIED, suffix=TENSORS_SUFFIX),
    Peer("tensorizer-hashes", hashes, TENSORIZER, "verify_hash", VERIFIED, suffix=TENSORS_SUFFIX),
    Peer("fst-tensors-encrypted", fst_secret, None, ".tensors, encrypted", VERIFIED, suffix=SECRET_SUFFIX),
    Peer("tensorizer-encrypted", secret, TENSORIZER, "encrypted", VERIFIED, suffix=SECRET_SUFFIX),
)
PEERS = {peer.name: peer for peer in _PEERS}
PEERS_OF_FILES = [peer.name for peer in _PEERS if peer.actions]
PEERS_OF_RANKS = [peer.name for peer in _PEERS if "sharded" in peer.actions]
PEERS_OF_URLS = [peer.name for peer in _PEERS if peer.schemes]


def install_missing(names: Iterable[str], python_version: str | None = None) -> None:
    """Installs missing releases. A release that cannot be installed is reported and stays missing."""
    releases = (PEERS[name].release for name in names)
    for release in dict.fromkeys(release for release in releases if release and not release.directory.exists()):
        print(f"installing {release.package} {release.version}", file=sys.stderr, flush=True)
        try:
            release.install(python_version)
        except subprocess.CalledProcessError as error:
            print(f"{release.package} {release.version}: pip ended with {error.returncode}", file=sys.stderr)


def own_directory() -> list[Path]:
    """Returns the directory from which this process imports fst; empty if fst is not installed."""
    found = find_spec("fst")
    return [Path(found.origin).parents[1]] if found and found.origin else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs the libraries that fst is compared with.")
    parser.add_argument("--python-version", help="fetch wheels for another Python version, such as 3.12")
    install_missing(PEERS, parser.parse_args().python_version)


if __name__ == "__main__":
    main()
