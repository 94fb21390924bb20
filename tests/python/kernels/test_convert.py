"""The per-element logic of the device kernels on the host. `cargo test` runs the kernels on a simulated GPU."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from patterns import E4M3_SATURATES
from suite import CHECKOUT


@pytest.mark.skipif(E4M3_SATURATES, reason="the kernels follow the reference PyTorch, whose F8_E4M3 does not saturate")
def test_casts_match_pytorch_bit_by_bit(tmp_path):
    """Compares the per-element code with the headers that PyTorch's kernels are compiled from."""
    root = Path(torch.__file__).parent
    program = tmp_path / "convert"
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-O1", "-ffp-contract=off"]
    compiler += ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    includes = ["-I", CHECKOUT / "csrc", "-isystem", root / "include"]
    libraries = ["-L", root / "lib", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    sources = [CHECKOUT / "tests" / "kernels" / "convert.cpp"]
    subprocess.run([*compiler, *includes, *sources, "-o", program, *libraries], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30_000_000
