"""Counters of processes, from /proc."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import ForkedProgram

# Bytes that a process may read beyond tensor data: headers, /proc itself, and pages at the ends of reads.
SLACK_BYTES = 64 << 10


def read_bytes(process: int | str = "self") -> int:
    """Returns how many bytes a process has read through system calls."""
    return _field(process, "rchar")


def storage_bytes() -> int:
    """Returns how many bytes storage has read for this process."""
    return _field("self", "read_bytes")


def written_bytes(process: int | str = "self") -> int:
    """Returns how many bytes a process has written through system calls."""
    return _field(process, "wchar")


def status_mib(field: str) -> int:
    """Returns a size of this process in MiB, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)[field].split()[0]) // 1024


def peak_mib(function: Callable[[], object]) -> int:
    """Returns by how many MiB the memory of this process grows at most while a function runs."""
    # Resets the peak to the current size.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    function()
    return status_mib("VmHWM") - before


def wait_for_reads(process: subprocess.Popen[Any] | ForkedProgram, count: int) -> int:
    """Waits until a process has read `count` more bytes. Returns its counter before the wait."""
    return _wait(process, read_bytes, count)


def wait_for_writes(process: subprocess.Popen[Any] | ForkedProgram, count: int) -> None:
    """Waits until a process has written `count` more bytes."""
    _wait(process, written_bytes, count)


def _wait(process: subprocess.Popen[Any] | ForkedProgram, counter: Callable[[int], int], count: int) -> int:
    before = counter(process.pid)
    while counter(process.pid) < before + count:
        assert process.poll() is None
    return before


def _field(process: int | str, name: str) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])
