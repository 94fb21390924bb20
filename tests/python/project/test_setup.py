"""`setup.py` on machines for which fst cannot be built."""

import subprocess
import sys

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
