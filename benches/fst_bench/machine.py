"""Properties of the machine: processor, memory, disk, versions and load."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .directories import PACKAGE


def machine_facts(directory: Path) -> dict[str, Any]:
    """Describes this machine, and the disk and file system that hold `directory`."""
    import torch

    facts = {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "virtual machine": " hypervisor " in f" {_field('/proc/cpuinfo', 'flags')} ",
        "memory_bytes": int(_field("/proc/meminfo", "MemTotal").removesuffix("kB")) * 1024,
        "kernel": platform.release(),
        **_disk(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts["gpu driver"] = _nvidia_driver()
    return facts


def load_average() -> float:
    """Returns the load average of the last minute. A value far from 0 before a run means a busy machine."""
    return os.getloadavg()[0]


def commit() -> str:
    """Returns the commit of the measured sources."""
    git = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _disk(directory: Path) -> dict[str, Any]:
    """Returns the mount of `directory`: the last of the mount points that are prefixes of the path."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    resolved = directory.resolve()
    file_system, source = "unknown", "unknown"
    longest = -1
    for mount, kind in mounts:
        point = mount.split()[4]
        if resolved.is_relative_to(point) and len(point) >= longest:
            longest = len(point)
            file_system, source = kind.split()[:2]
    queue = Path("/sys/class/block") / Path(source).name / "queue"
    read_ahead = queue / "read_ahead_kb"
    return {
        "file system": file_system,
        "disk": source,
        "disk_read_ahead_bytes": int(read_ahead.read_text()) * 1024 if read_ahead.exists() else None,
    }


def _nvidia_driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "unknown"
    words = path.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
