"""Versions of the package, of its installed metadata, and of the packages that fst.compat mirrors."""

import re
from importlib import metadata
from pathlib import Path

import pytest

import fst
from fst.compat import fastsafetensors, instanttensor, tensorizer, unifiedefficientloader
from fst_bench import peer
from suite import CHECKOUT


def test_version_matches_manifest():
    manifest = (CHECKOUT / "Cargo.toml").read_text()
    assert fst.__version__ == re.search(r'^version = "(.+)"$', manifest, re.MULTILINE)[1]


def test_version_matches_installed_package():
    try:
        installed = metadata.distribution("fst")
    except metadata.PackageNotFoundError:
        pytest.skip("fst is imported from the checkout")
    if not Path(str(installed.locate_file("fst"))).samefile(Path(fst.__file__).parent):
        pytest.skip("another fst is installed")
    assert fst.__version__ == installed.version


@pytest.mark.parametrize(
    ("package", "release"),
    [
        (fastsafetensors, peer.FASTSAFETENSORS),
        (instanttensor, peer.INSTANTTENSOR),
        (tensorizer, peer.TENSORIZER),
        (unifiedefficientloader, peer.UNIFIED),
    ],
    ids=lambda value: getattr(value, "package", None),
)
def test_compat_releases_match_benchmarks(package, release):
    assert package.__version__ == release.version
