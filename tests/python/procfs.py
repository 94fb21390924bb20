"""Counters of processes, from /proc."""

from pathlib import Path

# Bytes that a process may read beyond tensor data: headers, /proc itself, and pages at the ends of reads.
SLACK_BYTES = 64 << 10


def read_bytes(process: int | str = "self") -> int:
    """Returns how many bytes a process has read through system calls."""
    return _field(process, "rchar")


def written_bytes(process: int | str = "self") -> int:
    """Returns how many bytes a process has written through system calls."""
    return _field(process, "wchar")


def _field(process: int | str, name: str) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])
