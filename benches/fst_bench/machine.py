"""Properties of the machine: processor, memory, disk, versions and load."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .directories import PACKAGE


def machine_facts(directory: Path) -> dict[str, Any]:
    """Describes this machine, and the disk and file system that hold `directory`."""
    # Programs that only name the commit do not wait for PyTorch.
    import torch

    facts: dict[str, Any] = {
        "processor": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "virtual machine": " hypervisor " in f" {field('/proc/cpuinfo', 'flags')} ",
        "memory_bytes": int(field("/proc/meminfo", "MemTotal").removesuffix("kB")) * 1024,
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
    """Returns the commit of the measured sources: that of the checkout, or of the variable FST_COMMIT in a copy without
    its history."""
    git = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return os.environ.get("FST_COMMIT", "unknown")
    return done.stdout.strip() or os.environ.get("FST_COMMIT", "unknown")


def field(path: str, name: str) -> str:
    """Returns a value of a file of /proc, which has lines of names and values."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _disk(directory: Path) -> dict[str, str]:
    """Returns the mount of `directory`: the last of the mount points that are prefixes of the path."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [(mount.split()[4], *kind.split()[:2]) for mount, kind in reversed(mounts)]
    resolved = directory.resolve()
    fitting = (point for point in points if resolved.is_relative_to(point[0]))
    _, file_system, source = max(fitting, key=lambda point: len(point[0]))
    return {"file system": file_system, "disk": source}


def _nvidia_driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "unknown"
    words = path.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
