"""Resident memory of this process, and its peak since the last reset."""

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


def _bytes(text: str) -> int:
    return int(text.removesuffix("kB")) * 1024
