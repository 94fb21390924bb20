"""Runs the suites of programs that use safetensors, with and without `fst.patch()`, and prints the tests that differ.

    python tests/upstream/run.py safetensors accelerate

Run it by hand, in the environment of `make build`, see README.md beside it. Suites come from the sdists on PyPI, and
other packages are installed in a temporary environment on top of this one, so that there is one PyTorch only.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import environments

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]


class Suite(NamedTuple):
    """Tests of a program.

    Attributes:
        release: The release whose sdist has the tests, as a requirement.
        folder: The folder in the sdist in which the tests run.
        tests: The arguments of pytest that select the tests, none of which needs a network.
        replaces: Whether the release is installed, although another one may be installed already.
        requires: Other packages that the tests need.
    """

    release: str
    folder: str
    tests: tuple[str, ...]
    replaces: bool = False
    requires: tuple[str, ...] = ()


# Tests of other frameworks need these frameworks.
_SAFETENSORS = ("tests", *(f"--ignore=tests/test_{name}_comparison.py" for name in ("flax", "mlx", "paddle", "tf")))
_PEFT = ("bufferdict", "randlora", "shira", "vblora", "vera")
SUITES = {
    "safetensors": Suite("safetensors==0.8.0", "bindings/python", _SAFETENSORS),
    "safetensors-0.9": Suite("safetensors==0.9.0rc1", "bindings/python", _SAFETENSORS, replaces=True),
    "accelerate": Suite(
        "accelerate==1.15.0",
        ".",
        (
            *(f"tests/test_{name}.py" for name in ("accelerator", "modeling_utils", "state_checkpointing", "utils")),
            "-k=safetensors or UseSafetensors or checkpoint or load_state_dict or save",
        ),
        requires=("parameterized",),
    ),
    "peft": Suite(
        "peft==0.21.2",
        ".",
        tuple(f"tests/test_{name}.py" for name in _PEFT),
        replaces=True,
        requires=("datasets", "parameterized", "scipy"),
    ),
    "timm": Suite(
        "timm==1.0.31",
        ".",
        # The script train.py is not in the sdist.
        ("tests/test_checkpoint_loading.py", "tests/test_checkpoint_saver.py", "-k=not test_train_"),
        replaces=True,
        requires=("torchvision==0.26.0",),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="the suites to run; all if none is named")
    names = parser.parse_args().suites or list(SUITES)
    different = [name for name in names if not _compare(name, SUITES[name])]
    if different:
        sys.exit(f"tests differ under fst.patch(): {', '.join(different)}")


def _compare(name: str, suite: Suite) -> bool:
    """Runs a suite twice. Returns whether all tests have the same outcome, and fst has loaded tensors for them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = _environment(folder, suite)
        outcomes = []
        for plugins in ((), ("-p", "patched")):
            # Each run gets fresh files, because tests write to their folder.
            source = _sources(folder, suite, "patched" if plugins else "plain")
            outcomes.append(_run(python, source, [*plugins, *suite.tests], folder / "results.xml"))
        loaded = int((source / "loaded.txt").read_text())
    plain, patched = outcomes
    print(f"{name}: {len(plain)} tests without fst.patch(), {len(patched)} with it")
    for outcome in ("passed", "failed", "skipped"):
        counts = [sum(item == outcome for item in run.values()) for run in outcomes]
        print(f"    {outcome}: {counts[0]} and {counts[1]}")
    changed = sorted(test for test in plain.keys() | patched.keys() if plain.get(test) != patched.get(test))
    for test in changed:
        print(f"    {test}: {plain.get(test)} without, {patched.get(test)} with")
    print(f"    tensors loaded by fst: {loaded}")
    return not changed and "passed" in plain.values() and loaded > 0


def _environment(folder: Path, suite: Suite) -> Path:
    """Creates an environment on top of this one. Returns its Python."""
    python = environments.create(folder / "venv")
    if suite.replaces:
        environments.install_release(python, suite.release)
    if suite.requires:
        environments.install(python, *suite.requires)
    return python


def _sources(folder: Path, suite: Suite, name: str) -> Path:
    """Unpacks the sdist of a suite. Returns the folder in which its tests run."""
    project = re.split("[=<>]", suite.release)[0]
    downloads = folder / "downloads"
    if not downloads.exists():
        environments.pip("download", "--no-deps", "--no-binary", project, "--dest", downloads, suite.release)
    [archive] = downloads.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder / name, filter="data")
    [source] = (folder / name).iterdir()
    # Sdists may lack the file that makes the tests a package, which some of them need.
    (source / suite.folder / "tests" / "__init__.py").touch()
    return source / suite.folder


def _run(python: Path, source: Path, arguments: list[str], results: Path) -> dict[str, str]:
    """Runs pytest. Returns the outcome of each test."""
    path = os.pathsep.join([str(CHECKOUT / "torch_ext"), str(HERE)])
    environ = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={results}"]
    # The tests may fail. Their outcomes are compared.
    subprocess.run([python, "-m", "pytest", *options, *arguments], cwd=source, env=environ, check=False)
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    results.unlink()
    return outcomes


if __name__ == "__main__":
    main()
