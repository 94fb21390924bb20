"""The command `fst` without PyTorch: help, the version, and which processes are the command."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst._core.dtypes import dtype_named
from fst.cli import parser
from fst_bench.http_server import Server
from suite import CHECKOUT

# Prints, so that an attempt to import PyTorch is found although it fails.
BLOCKED = "import sys\nprint('PyTorch was tried', file=sys.stderr)\nraise ImportError('no PyTorch here')\n"
# The help of one subcommand imports the modules of all.
HELP = [[], ["-h"], ["--help"], ["verify", "--help"]]


@pytest.fixture
def without_torch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with fst, but with a module `torch` that cannot be imported."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text(BLOCKED)
    path = f"{tmp_path / 'blocked'}:{Path(fst.__file__).parents[1]}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {"PYTHONPATH": path, "PATH": "/usr/bin"}
        return subprocess.run(
            [sys.executable, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_needs_no_pytorch(without_torch, arguments):
    done = without_torch("-X", "utf8", "-m", "fst_command", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["usage: fst", *arguments[:-1]]))


def test_version_needs_no_pytorch(without_torch):
    release = ".".join(torch.__version__.split(".")[:2])
    for option in ("--version", "-V"):
        done = without_torch("-m", "fst_command", option)
        assert (done.returncode, done.stdout) == (0, f"fst {fst.__version__}, built for PyTorch {release}\n")


def test_closed_output_is_no_error(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    command = f"{shlex.quote(sys.executable)} -m fst inspect model.safetensors >&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_that_are_not_imported_are_named():
    program = "import fst; fst.dcp"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("AttributeError: module 'fst' has no attribute 'dcp'; import fst.dcp first\n")


def test_misspelt_command_and_completion_need_no_pytorch(without_torch):
    for arguments, code in ((["inspcet"], 2), (["completion", "bash"], 0)):
        done = without_torch("-m", "fst_command", *arguments)
        assert (done.returncode, "PyTorch was tried" in done.stderr) == (code, False)


def test_import_runs_no_command(without_torch, tmp_path):
    """An import of the package is one, whatever the program and its arguments are called."""
    assert '\nfst = "fst_command:main"\n' in (CHECKOUT / "pyproject.toml").read_text()
    (tmp_path / "fst").write_text("import fst\n")
    for arguments in (["fst", "--help"], ["-m", "fst", "--help"]):
        done = without_torch(*arguments)
        assert done.returncode == 1, arguments
        assert "no PyTorch here" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "fst", "inspect", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: fst inspect")


def test_subcommands_need_pytorch(without_torch):
    done = without_torch("-m", "fst_command", "inspect", "--", "--help")
    assert (done.returncode, done.stderr) == (1, "PyTorch was tried\nfst: no PyTorch here\n")


def test_dtypes_have_the_names_that_loads_accept():
    for text in ("fp16", "half", "torch.bfloat16", "BF16", "double"):
        [(pattern, name)] = parser().parse_args(["time", "a", "--dtype", f"*.weight={text}"]).dtype
        assert (pattern, getattr(torch, name)) == ("*.weight", dtype_named(text))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_an_operator(tmp_path, number, code):
    """Both end a load in its operator, not only after it, and without a traceback."""
    fst.save_file({"x": torch.zeros(1 << 22)}, tmp_path / "x")
    with Server(rate=1e5) as server:
        server.put("x.safetensors", (tmp_path / "x").read_bytes())
        command = [sys.executable, "-m", "fst", "time", server.url("x.safetensors")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(server.requests()) < 2:
                time.sleep(0.01)
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (code, "", "")
