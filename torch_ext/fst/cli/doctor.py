"""`fst doctor`: prints what this machine offers a load, and what to change.

Runs without the names of the package (see `fst_command`), because a PyTorch or a library that cannot be imported is a
result here.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fst._core.build import layer_for, torch_releases
from fst._core.files import safetensors_in
from fst._core.urls import is_remote, without_secrets
from fst._profile.formatting import format_count, format_size, visible, visible_lines
from fst.cli import machine
from fst.cli.arguments import Paths
from fst.cli.message import message_of
from fst.cli.table import table

# Variables of the environment that rust/options.rs reads.
OPTIONS = (
    "FST_CACHE_BYTES",
    "FST_CACHE_DIR",
    "FST_CHUNK_BYTES",
    "FST_DROP_CACHE",
    "FST_ENCRYPTION_KEY_FILE",
    "FST_ENCRYPTION_PASSPHRASE_FILE",
    "FST_LOG",
    "FST_QUEUE_DEPTH",
    "FST_READER",
    "FST_REQUEST_BYTES",
    "FST_STAGING_BYTES",
    "FST_STALL_SECONDS",
    "FST_THREADS",
)
# Services of URLs, with the beginnings of the variables that configure them.
_SERVICES = {
    "http, https": ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_", "CURL_CA_", "REQUESTS_CA_"),
    "s3": ("AWS_",),
    "gs": ("GOOGLE_", "STORAGE_EMULATOR_HOST"),
    "az, abfss": ("AZURE_",),
    "hf": ("HF_", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE"),
    "redis, rediss": ("REDISCLI_AUTH",),
}
# Oldest driver of NVIDIA that fst works with, from CUDA 12.0.
_DRIVER_MIN = (525, 60)
# Oldest compute capability for which there are device kernels.
_CAPABILITY_MIN = (7, 5)
_OPEN_FILES_MIN = 1024
_ERRORS = (OSError, ValueError, LookupError, ImportError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Item:
    """Result of one probe.

    Attributes:
        name: Name of what was probed.
        text: Result for a person.
        data: Result for a program, which JSON can hold.
        advice: Change that would help, or None.
        is_fatal: Whether fst cannot work at all.
    """

    name: str
    text: str
    data: Any
    advice: str | None = None
    is_fatal: bool = False


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="print what this machine offers a load, and what to change",
        description="Probes PyTorch, the library of fst, GPUs, the kernel and the file systems of the paths. Values of "
        "variables that may be secret are not printed. The exit code is 0 unless fst cannot work at all.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        action=Paths,
        metavar="PATH",
        help="file, directory or URL to load from; by default the current directory. In a directory without "
        "checkpoint, a small file is written and removed",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    items = [_system(), _pytorch(), _library(), *_gpus(), _io_uring(), _gds(), _memory(), *_limits(), _numa()]
    items += [_huge_pages(), _remote(), _options()]
    paths = [_path(path) for path in arguments.paths or ["."]]
    works = not any(item.is_fatal for item in items)
    advice = [f"{item.name}: {item.advice}" for item in (*items, *paths) if item.advice]
    if arguments.json:
        report = {
            "works": works,
            "machine": {item.name: item.data for item in items},
            "paths": {item.name: item.data for item in paths},
            "advice": advice,
        }
        print(json.dumps(report, indent=2))
    else:
        print(table([item.name, item.text] for item in items))
        # Paths have lines of their own, because they may be long.
        print("".join(f"\n{visible(item.name)}\n  {visible_lines(item.text)}\n" for item in paths), end="")
        print("\nWhat to change:" if advice else "\nNothing to change.")
        print("".join(f"- {visible_lines(line)}\n" for line in advice), end="")
        if not works:
            print("fst does not work here.")
    return int(not works)


def _system() -> Item:
    data: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
    cores = format_count(data["cores"], "core")
    return Item("system", f"Linux {data['kernel']}, {data['machine']}, {cores}; Python {data['python']}", data)


def _pytorch() -> Item:
    try:
        import torch
    # Libraries that PyTorch loads fail in many ways.
    except Exception as error:
        message = f"cannot be imported: {error}"
        return Item("PyTorch", message, {"error": str(error)}, "install PyTorch in this environment", is_fatal=True)
    build = {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": getattr(torch.version, "hip", None)}
    if build["rocm"]:
        text = f"{build['version']}, ROCm {build['rocm']}"
        return Item("PyTorch", text, build, "with ROCm, fst loads to the CPU only")
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "CPU only"
    return Item("PyTorch", f"{build['version']}, {cuda}", build)


def _library() -> Item:
    data: dict[str, Any] = {"path": None, "version": None, "built_for_pytorch": torch_releases()}
    try:
        import torch

        from fst._core.library import version
    except _ERRORS as error:
        data["error"] = str(error)
        return Item("fst", f"cannot be loaded: {error}", data, "build or install fst for this PyTorch", is_fatal=True)
    data |= {"path": str(layer_for(torch.__version__)), "version": version}
    return Item("fst", f"{version}, built for PyTorch {', '.join(data['built_for_pytorch'])}: {data['path']}", data)


def _has_gpu() -> bool:
    """Returns whether PyTorch can be imported and finds a GPU."""
    try:
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()
    except Exception:
        return False


def _gpus() -> list[Item]:
    driver = machine.nvidia_driver()
    if not _has_gpu():
        hint = "PyTorch finds no GPU: install a PyTorch with CUDA, and check CUDA_VISIBLE_DEVICES and the driver"
        text = f"none that PyTorch can use; driver {driver}" if driver else "none, no driver"
        return [Item("GPU", text, {"driver": driver, "devices": []}, hint if driver else None)]

    import torch

    devices: list[dict[str, Any]] = []
    advice = []
    if driver and tuple(map(int, driver.split(".")[:2])) < _DRIVER_MIN:
        advice.append(f"update the driver; fst needs {'.'.join(map(str, _DRIVER_MIN))} or newer")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = found.major, found.minor
        missing = _missing_kernels(index)
        device = {"name": found.name, "memory_bytes": found.total_memory, "capability": list(capability)}
        devices.append(device | {"has_kernels": missing is None, "missing_kernels": missing})
        if missing is not None:
            is_too_old = capability < _CAPABILITY_MIN
            remedy = "" if is_too_old else "; a driver from 580 on needs not compile them"
            advice.append(
                f"{found.name} has no device kernels of fst, so small tensors are copied one by one: {missing}{remedy}"
            )
    texts = [f"{device['name']}, {format_size(device['memory_bytes'])}" for device in devices]
    data = {"driver": driver, "devices": devices}
    return [Item("GPU", f"{'; '.join(texts)}; driver {driver}", data, "; ".join(advice) or None)]


def _missing_kernels(index: int) -> str | None:
    """Returns why a cast on a GPU does not use the device kernels of fst, or None if it does."""
    import torch

    import fst

    try:
        with fst.profile() as profile:
            fst.cast([torch.ones(1, device=f"cuda:{index}")], dtype=torch.float16)
    except _ERRORS as error:
        return str(error)
    return profile.summary().missing_kernels.get(f"cuda:{index}")


def _io_uring() -> Item:
    refusal = machine.io_uring_refusal()
    disabled = machine.kernel_parameter("kernel/io_uring_disabled")
    data = {"available": refusal is None, "io_uring_disabled": disabled}
    if refusal is None:
        return Item("io_uring", "available", data)
    data["error"] = machine.describe(OSError(refusal, os.strerror(refusal)))
    if disabled not in (None, "0"):
        advice = f"`sysctl kernel.io_uring_disabled=0`; it is {disabled}"
    elif refusal == errno.ENOMEM:
        advice = "raise the memory lock limit (`ulimit -l`)"
    else:
        advice = (
            "allow io_uring_setup, io_uring_enter and io_uring_register, for example in the container's seccomp profile"
        )
    return Item("io_uring", f"refused ({data['error']}); fst reads through the page cache", data, advice)


def _gds() -> Item:
    data = {"nvidia_fs": machine.has_nvidia_fs(), "libcufile": machine.cufile()}
    driver = "nvidia-fs is loaded" if data["nvidia_fs"] else "no driver nvidia-fs"
    return Item("GPUDirect Storage", f"{driver}; {data['libcufile'] or 'no libcufile'}", data)


def _memory() -> Item:
    data = machine.memory_bytes()
    texts = [
        f"{format_size(amount)} {name.removesuffix('_bytes').replace('_', ' ')}"
        for name, amount in data.items()
        if amount is not None
    ]
    return Item("page cache", ", ".join(texts), data)


def _limits() -> list[Item]:
    items = []
    for name, number in (("memory lock limit", resource.RLIMIT_MEMLOCK), ("open files", resource.RLIMIT_NOFILE)):
        soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(number))
        text = "unlimited" if soft is None else format_size(soft) if "lock" in name else f"{soft:,}"
        is_low = number == resource.RLIMIT_NOFILE and soft is not None and soft < _OPEN_FILES_MIN
        advice = f"`ulimit -n {_OPEN_FILES_MIN}`; a load keeps all files of its checkpoint open" if is_low else None
        items.append(Item(name, text, {"soft": soft, "hard": hard}, advice))
    return items


def _numa() -> Item:
    nodes = machine.numa_nodes()
    return Item("NUMA", format_count(nodes, "node"), {"nodes": nodes})


def _huge_pages() -> Item:
    mode = machine.huge_pages()
    advice = "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`; new CPU tensors then fill faster"
    return Item("huge pages", mode or "unknown", {"mode": mode}, advice if mode == "never" else None)


def _remote() -> Item:
    """Names the variables that are set for each service. Their values may be secret."""
    found = {
        service: sorted(name for name in os.environ if name.upper().startswith(beginnings))
        for service, beginnings in _SERVICES.items()
    }
    texts = [f"{service} ({', '.join(names)})" if names else service for service, names in found.items()]
    return Item("remote", "; ".join(texts), found)


def _options() -> Item:
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FST_")}
    # Values of variables that fst does not read may be anything.
    known = {name: value for name, value in given.items() if name in OPTIONS}
    unknown = [name for name in given if name not in OPTIONS]
    text = ", ".join([*(f"{name}={value}" for name, value in known.items()), *unknown]) or "defaults"
    data = {"options": known, "unknown": unknown}
    try:
        with machine.sample_file(Path(tempfile.gettempdir())) as sample:
            _reader(str(sample))
    except ValueError as error:
        return Item("options", text, data | {"error": str(error)}, f"every load fails: {error}", is_fatal=True)
    except _ERRORS:
        pass  # The library has an item of its own, and a directory that cannot be written is no fault of the options.
    advice = f"fst has no option {', '.join(unknown)}" if unknown else None
    return Item("options", text, data, advice)


def _path(path: str) -> Item:
    if is_remote(path):
        return _url(path)
    place = Path(path.removeprefix("file://"))
    name = str(place)
    if not place.exists():
        return Item(name, "does not exist", {"exists": False}, "check the path")
    files = [place / name for name in safetensors_in(place)] if place.is_dir() else [place]
    data: dict[str, Any] = {"exists": True, "file_system": machine.file_system(place)}
    data["bytes"] = sum(file.stat().st_size for file in files)
    try:
        if files:
            tested = _test_reads(files[0])
        else:
            with machine.sample_file(place) as sample:
                tested = _test_reads(sample)
    except _ERRORS as error:
        data["error"] = str(error)
        return Item(
            name, f"{data['file_system']}; reads were not tested", data, message_of(error).removeprefix(f"{name}: ")
        )
    data |= tested
    direct = "O_DIRECT works" if data["direct"] else f"no O_DIRECT ({data['direct_error']})"
    readers = f"new CPU tensors: {data['view_reader']}; direct reads: {data['direct_reader']}"
    return Item(name, f"{data['file_system']}; {direct}; {readers}", data, _path_advice(data))


def _path_advice(data: dict[str, Any]) -> str | None:
    if data["view_reader"] == "pread":
        return f"{data['file_system']} is served over a network or by another process; a local disk is faster"
    available = machine.memory_bytes()["available_bytes"]
    if available is not None and data["bytes"] > available:
        sizes = f"{format_size(data['bytes'])} of files, {format_size(available)} of memory"
        return f"the page cache cannot hold the checkpoint ({sizes}), so that each load reads from the disk"
    return None


def _test_reads(file: Path) -> dict[str, Any]:
    """Reads a file directly, and asks fst which readers it would use."""
    refusal = machine.direct_read_refusal(file)
    with _environment(FST_READER="auto", FST_DROP_CACHE="0"):
        view_reader = _reader(str(file))
    with _environment(FST_READER="uring"):
        direct_reader = _reader(str(file))
    return {
        "direct": refusal is None,
        "direct_error": refusal,
        "view_reader": view_reader,
        "direct_reader": direct_reader,
    }


def _url(path: str) -> Item:
    name = without_secrets(path)
    try:
        from fst._core.checkpoint import Checkpoint

        count = len(Checkpoint([path]).names())
    except _ERRORS as error:
        return Item(name, f"cannot be opened: {error}", {"error": str(error)}, "see docs/remote.md")
    return Item(name, f"opened, {format_count(count, 'tensor')}", {"tensors": count})


def _reader(path: str) -> str:
    """Returns the readers that fst would use to load a file to the CPU, after their probes."""
    from fst._core.ops import reader

    return reader([path])


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        os.environ.update(values)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
