"""`fst doctor`: what it finds, what it advises, and what it hides."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst._core.build import layer_for
from fst.cli import doctor, machine
from fst_bench.http_server import Server
from suite import CHECKOUT

SECRET = "s3cr3t"


@pytest.fixture
def report(command) -> Callable[..., dict]:
    """Runs `fst doctor --json`, which must say that fst works, and returns its report."""

    def run(*arguments: object) -> dict:
        done = command("doctor", "--json", *arguments)
        shown = json.loads(done.stdout)
        assert (done.returncode, shown["works"]) == (0, True), shown
        return shown

    return run


def test_json(report, tmp_path):
    shown = report(tmp_path)
    assert shown["machine"]["PyTorch"]["version"] == torch.__version__
    assert shown["machine"]["fst"]["version"] == fst.__version__
    assert shown["machine"]["fst"]["path"] == str(layer_for(torch.__version__))
    assert shown["machine"]["page cache"]["total_bytes"] > 0
    assert bool(shown["machine"]["GPU"]["devices"]) == torch.cuda.is_available()
    assert shown["machine"]["NUMA"]["nodes"] >= 1
    assert shown["machine"].keys() >= {"memory lock limit", "io_uring", "GPUDirect Storage", "remote", "options"}
    path = shown["paths"][str(tmp_path)]
    assert path["file_system"]
    assert path["view_reader"] in ("mmap", "pread")
    assert path["direct_reader"] == ("uring" if path["direct"] and machine.io_uring_refusal() is None else "pread")
    assert list(tmp_path.iterdir()) == []


def test_table(command, monkeypatch, tmp_path):
    done = command("doctor", tmp_path)
    assert done.returncode == 0
    assert re.search(rf"^PyTorch +{re.escape(torch.__version__)}", done.stdout, re.MULTILINE)
    assert re.search(r"^memory lock limit +", done.stdout, re.MULTILINE)
    assert f"\n{tmp_path}\n  " in done.stdout
    assert re.search(r"^(What to change:|Nothing to change\.)$", done.stdout, re.MULTILINE)
    monkeypatch.setenv("FST_READER", "fast")
    done = command("doctor", tmp_path)
    assert done.returncode == 1
    assert "options: every load fails: FST_READER is" in done.stdout
    assert os.environ["FST_READER"] == "fast"


def test_paths(report, monkeypatch, tmp_path):
    """Files are read and not changed."""
    save_file({"a": torch.ones(400)}, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").stat()
    for path in (tmp_path, tmp_path / "a.safetensors"):
        assert report(path)["paths"][str(path)]["bytes"] == before.st_size
    assert (tmp_path / "a.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    shown = report(tmp_path / "damaged.safetensors", tmp_path / "absent")
    assert "error" in shown["paths"][str(tmp_path / "damaged.safetensors")]
    assert shown["paths"][str(tmp_path / "absent")] == {"exists": False}
    assert f"{tmp_path / 'absent'}: check the path" in shown["advice"]
    assert any("this is a text, not safetensors" in line for line in shown["advice"])
    memory = machine.memory_bytes()
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory | {"available_bytes": 1000})
    monkeypatch.setattr(machine, "direct_read_refusal", lambda path: "open: EINVAL, Invalid argument")
    shown = report(tmp_path / "a.safetensors")
    assert any("the page cache cannot hold" in line for line in shown["advice"])
    path = shown["paths"][str(tmp_path / "a.safetensors")]
    assert (path["direct"], path["direct_error"]) == (False, "open: EINVAL, Invalid argument")


def test_no_secret_is_printed(command, tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "REDISCLI_AUTH", "AZURE_STORAGE_ACCOUNT_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("FST_PASSWORD", SECRET)
    with Server() as server:
        address = server.url("a.safetensors").removeprefix("http://")
        url = f"http://user:{SECRET}@{address}?token={SECRET}"
        for arguments in ([url], [url, "--json"]):
            done = command("doctor", *arguments)
            assert done.returncode == 0
            assert SECRET not in done.stdout + done.stderr
            for shown in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "REDISCLI_AUTH", f"http://{address}"):
                assert shown in done.stdout
            assert "fst has no option FST_PASSWORD" in done.stdout


def test_options_are_those_of_the_core():
    sources = [CHECKOUT / "rust" / name for name in ("options.rs", "encryption/keyring.rs")]
    read = re.findall(r'"(FST_[A-Z_]+)"', "".join(source.read_text() for source in sources))
    assert set(doctor.OPTIONS) == set(read)


@pytest.mark.parametrize(
    ("refusal", "disabled", "advice"),
    [
        (errno.EPERM, "2", "kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", "seccomp"),
        (errno.ENOSYS, None, "seccomp"),
        (errno.ENOMEM, "0", "ulimit -l"),
    ],
)
def test_refused_io_uring(report, monkeypatch, tmp_path, refusal, disabled, advice):
    monkeypatch.setattr(machine, "io_uring_refusal", lambda: refusal)
    monkeypatch.setattr(machine, "kernel_parameter", lambda name: disabled)
    shown = report(tmp_path)
    assert shown["machine"]["io_uring"]["error"].startswith(errno.errorcode[refusal])
    [found] = [line for line in shown["advice"] if line.startswith("io_uring: ")]
    assert advice in found


@pytest.mark.parametrize("module", ["raise ImportError('no PyTorch')", "raise OSError('libcudart.so.13: missing')"])
def test_pytorch_that_cannot_be_imported(tmp_path, module):
    """The command that says what is wrong works where `import fst` does not."""
    (tmp_path / "torch.py").write_text(module)
    environ = {"PYTHONPATH": f"{tmp_path}:{Path(fst.__file__).parents[1]}", "PATH": "/usr/bin"}
    command = [sys.executable, "-m", "fst_command", "doctor", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    shown = json.loads(done.stdout)
    assert shown["works"] is False
    assert "'" + shown["machine"]["PyTorch"]["error"] + "'" in module
    assert "PyTorch: install PyTorch in this environment" in shown["advice"]
    assert shown["machine"]["io_uring"]


def test_library_for_another_pytorch(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fst._core.library", None)
    done = command("doctor", tmp_path)
    assert done.returncode == 1
    assert re.search(r"^fst +cannot be loaded: ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("fst does not work here.\n")


@pytest.mark.gpu
def test_gpu(report, tmp_path):
    [device, *_] = report(tmp_path)["machine"]["GPU"]["devices"]
    assert device["name"] == torch.cuda.get_device_name(0)
    assert device["capability"] == list(torch.cuda.get_device_capability(0))
    assert (device["has_kernels"], device["missing_kernels"]) == (True, None)


def test_gpu_without_kernels(report, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="GPU", total_memory=1 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(doctor, "_missing_kernels", lambda index: "cuModuleLoadData failed")
    shown = report(tmp_path)
    [device] = shown["machine"]["GPU"]["devices"]
    assert (device["has_kernels"], device["missing_kernels"]) == (False, "cuModuleLoadData failed")
    [advice] = [line for line in shown["advice"] if line.startswith("GPU: ")]
    assert "cuModuleLoadData failed; a driver from 580 on" in advice


def test_version_of_the_driver(monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  "
    monkeypatch.setattr(machine, "_lines", lambda path: [line, "GCC version:  gcc version 15.3.0 (GCC)"])
    assert machine.nvidia_driver() == "580.159.04"


def test_file_system_of_the_innermost_mount(monkeypatch, tmp_path):
    (tmp_path / "a b" / "c").mkdir(parents=True)
    inner = str(tmp_path / "a b").replace(" ", r"\040")
    mounts = [
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"30 22 0:27 / {inner} rw - tmpfs shm rw",
        f"31 30 0:28 / {inner} rw - nfs4 server:/models rw",
    ]
    monkeypatch.setattr(machine, "_lines", lambda path: mounts)
    assert machine.file_system(tmp_path / "a b" / "c") == "nfs4"
    assert machine.file_system(tmp_path) == "ext4"
