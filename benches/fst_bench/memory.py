"""How much memory this process holds, and the most it held since the last reset."""

from pathlib import Path

LEFT_FREE_BYTES = 1 << 30


def claim(size_bytes: int) -> None:
    """Touches that much free memory and frees it again, as far as the machine has it.

    Some virtual machines hand free memory back to their host and get it anew page by page,
    far more slowly than a disk is read. Memory that was touched a moment ago is there.
    """
    import torch

    available = _proc_bytes("meminfo", "MemFree") - LEFT_FREE_BYTES
    torch.empty(max(0, min(size_bytes, available)), dtype=torch.uint8).fill_(1)


def reset_peak() -> None:
    """Lowers the recorded peak to what the process holds now; needs no privilege."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most that was resident at once, pages of mapped files included."""
    return _proc_bytes("self/status", "VmHWM")


def private_bytes() -> int:
    """Resident memory that is the process's own, without the page cache that it maps."""
    return _proc_bytes("self/status", "RssAnon")


def _proc_bytes(file: str, field: str) -> int:
    for line in Path("/proc", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise KeyError(f"/proc/{file} has no {field}")
