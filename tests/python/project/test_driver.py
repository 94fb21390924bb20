"""Functions of the CUDA driver that fst requires."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from suite import CHECKOUT

OLDEST = "cuda-12000"


def cudarc_sources():
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo")
    # Crates of other platforms are not downloaded.
    platform = ["--filter-platform", "x86_64-unknown-linux-gnu"]
    command = ["cargo", "metadata", "--format-version", "1", "--offline", "--locked", *platform]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cargo has not downloaded the crates: {done.stderr}")
    [manifest] = [each["manifest_path"] for each in json.loads(done.stdout)["packages"] if each["name"] == "cudarc"]
    return Path(manifest).parent / "src" / "driver" / "sys" / "mod.rs"


def functions_of(version):
    """The functions that cudarc declares for a version of CUDA, which are in NVIDIA's header."""
    declared = re.findall(
        r"(?:^#\[cfg\((.*)\)\]\n)?^pub unsafe fn (cu\w+)\(", cudarc_sources().read_text(), re.MULTILINE
    )
    return {name for condition, name in declared if not condition or f'"{version}"' in condition}


def test_the_driver_of_cuda_12_0_has_every_function():
    oldest = functions_of(OLDEST)
    assert {"cuInit", "cuEventElapsedTime"} < oldest
    assert not {"cuEventElapsedTime_v2", "cuMemcpyBatchAsync"} & oldest
    sources = "".join(path.read_text() for path in (CHECKOUT / "rust" / "device").rglob("*.rs"))
    used = set(re.findall(r'\bsys::(cu[A-Z]\w+)|\bb"(cu[A-Z]\w+)"', sources))
    names = {name for pair in used for name in pair if name and not name.startswith("cuFile")}
    assert {"cuLaunchKernel", "cuEventElapsedTime"} < names
    assert names - oldest == set()


def test_the_simulated_driver_is_that_of_cuda_12_0():
    """A function of a later driver, which the simulated one lacks, fails the tests of the device."""
    api = (CHECKOUT / "tests" / "simcuda" / "src" / "api.rs").read_text()
    exported = set(re.findall(r'^(?:pub (?:unsafe )?extern "C" fn |    )(cu[A-Z]\w+)\(', api, re.MULTILINE))
    assert "cuEventElapsedTime" in exported
    assert exported - functions_of(OLDEST) == set()
