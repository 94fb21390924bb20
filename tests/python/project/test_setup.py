"""`setup.py` on machines for which fst cannot be built, and the source distribution."""

import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

import fst
from suite import CHECKOUT

# Pretends to be another operating system once setuptools is imported.
PROGRAM = """
import runpy, sys
import setuptools.command.bdist_wheel, setuptools.command.build_ext
sys.platform = "darwin"
sys.argv = ["setup.py", "build_ext", "--build-lib", sys.argv[1], "--build-temp", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_other_operating_systems_are_refused(tmp_path):
    command = [sys.executable, "-c", PROGRAM, tmp_path]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "fst runs on Linux only, and this is darwin" in done.stderr


def test_source_distribution_is_complete(tmp_path):
    """cargo refuses a manifest that names a file that is missing, which it does before it builds anything."""
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo")
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs the git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, source / name)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path / "dist"]
    workflow = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name"}
    subprocess.run(command, cwd=source, env=os.environ | workflow, check=True, timeout=120)
    [archive] = (tmp_path / "dist").iterdir()
    assert archive.name == f"torch_fst-{fst.__version__}.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    [root] = (tmp_path / "unpacked").iterdir()
    # The page of the package has no files to which a link could lead.
    fields, _, page = (root / "PKG-INFO").read_text().partition("\n\n")
    assert "Project-URL: Source, https://github.com/owner/name\n" in fields
    assert page.startswith((CHECKOUT / "README.md").read_text()[:20])
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []
    command = ["cargo", "metadata", "--format-version=1", "--no-deps", "--offline", "--locked"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needed = [path.relative_to(CHECKOUT) for path in (CHECKOUT / "csrc").rglob("*") if path.is_file()]
    needed += [path.relative_to(CHECKOUT) for path in (CHECKOUT / "torch_ext").rglob("*.h")]
    assert [path for path in needed if not (root / path).is_file()] == []
