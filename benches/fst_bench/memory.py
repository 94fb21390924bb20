"""Resident memory of this process, and its peak since the last reset."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from .machine import field

LEFT_FREE_BYTES = 1 << 30


def claim(size_bytes: int) -> None:
    """Touches this many bytes of free memory, or all that is free, and frees them again.

    Some virtual machines return free memory to their host. They get it back page by page, more slowly than a disk is
    read. Recently touched memory is still mapped.
    """
    available = _bytes(field("/proc/meminfo", "MemFree")) - LEFT_FREE_BYTES
    torch.empty(max(0, min(size_bytes, available)), dtype=torch.uint8).fill_(1)


def reset_peak() -> None:
    """Resets the recorded peak to the current value. Needs no privilege."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the peak of resident memory, including pages of mapped files."""
    return _bytes(field("/proc/self/status", "VmHWM"))


# Prints a line, and the largest value at the end of its input.
_WATCH = """
import select, sys
path, field, peak = f"/proc/{sys.argv[1]}/status", "RssAnon:", 0
print(flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    with open(path) as status:
        peak = max(peak, next(int(line.split()[1]) for line in status if line.startswith(field)))
print(peak * 1024)
"""


class AnonymousPeak:
    """Peak of the memory of this process that no file backs, as another process sees it every few milliseconds."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _WATCH, str(os.getpid())]
        self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._watcher.stdout is not None
        self._watcher.stdout.readline()
        self._before = _bytes(field("/proc/self/status", "RssAnon"))

    def end(self) -> int:
        """Ends the watch. Returns the bytes by which the peak exceeds the memory at its begin."""
        return max(0, int(self._watcher.communicate()[0]) - self._before)


def _bytes(text: str) -> int:
    return int(text.removesuffix("kB")) * 1024
