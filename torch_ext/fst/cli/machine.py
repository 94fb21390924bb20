"""Probes of the machine for `fst doctor`. They need neither PyTorch nor the library, and change nothing that stays."""

import ctypes
import errno
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Number of io_uring_setup(2), equal on all architectures of Linux.
_IO_URING_SETUP = 425
_URING_PARAMETERS_BYTES = 120
# Multiple of the alignments that disks require of direct reads.
_BLOCK_BYTES = 4096
_DATA_BYTES = 4 * _BLOCK_BYTES
# Names that rust/device/cuda/cufile.rs opens.
_CUFILE_NAMES = ("libcufile.so.0", "libcufile.so")
_OCTAL = re.compile(r"\\([0-7]{3})")


def io_uring_refusal() -> int | None:
    """Returns the errno with which the kernel refuses a ring, or None if it creates one."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_URING_PARAMETERS_BYTES))
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return None


def direct_read_refusal(path: Path) -> str | None:
    """Returns why a file cannot be read with O_DIRECT, or None if it can."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return f"open: {describe(error)}"
    try:
        # Anonymous memory begins at a page boundary, as direct reads require.
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        return f"read: {describe(error)}"
    finally:
        os.close(descriptor)
    return None


def describe(error: OSError) -> str:
    """Returns the name and the text of the error of a system call."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror}"


@contextmanager
def sample_file(directory: Path) -> Iterator[Path]:
    """Creates a small safetensors file, and removes it."""
    header = b'{"sample":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (_DATA_BYTES, _DATA_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".fst-doctor-", suffix=".safetensors") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(_DATA_BYTES))
        file.flush()
        yield Path(file.name)


def file_system(path: Path) -> str | None:
    """Returns the type of the file system that holds a path, as mount(8) prints it, or None if it is unknown."""
    real = path.resolve()
    found: tuple[int, str] | None = None
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
        # Of two mounts at one place, the later one covers the other.
        if real.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), after.split(" ")[0]
    return found[1] if found else None


def memory_bytes() -> dict[str, int | None]:
    """Returns the memory of the machine, and the limit of this process's control group if it has one."""
    amounts = dict(re.findall(r"^(\w+): +(\d+) kB$", "\n".join(_lines("/proc/meminfo")), re.MULTILINE))

    def amount(name: str) -> int | None:
        return int(amounts[name]) << 10 if name in amounts else None

    return {
        "total_bytes": amount("MemTotal"),
        "available_bytes": amount("MemAvailable"),
        "cached_bytes": amount("Cached"),
        "control_group_bytes": _control_group_bytes(),
    }


def _control_group_bytes() -> int | None:
    """Returns the smallest limit of the process's control group and of those around it. Knows version 2 only."""
    group = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    directory = Path("/sys/fs/cgroup") / group.lstrip("/")
    limits = [_lines(place / "memory.max") for place in (directory, *directory.parents)]
    return min((int(lines[0]) for lines in limits if lines and lines[0].isdecimal()), default=None)


def numa_nodes() -> int:
    """Returns the number of NUMA nodes."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def huge_pages() -> str | None:
    """Returns when the kernel uses transparent huge pages: "always", "madvise" or "never"."""
    found = re.search(r"\[(\w+)\]", "\n".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled")))
    return found[1] if found else None


def nvidia_driver() -> str | None:
    """Returns the version of NVIDIA's driver, or None without one."""
    text = "\n".join(_lines("/proc/driver/nvidia/version"))
    found = re.search(r"^NVRM.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else None


def has_nvidia_fs() -> bool:
    """Returns whether the kernel module of GPUDirect Storage is loaded."""
    return Path("/proc/driver/nvidia-fs").exists()


def cufile() -> str | None:
    """Returns the name by which the library of GPUDirect Storage is found, or None without it."""
    for name in _CUFILE_NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def kernel_parameter(name: str) -> str | None:
    """Returns a parameter of the kernel, such as "kernel/io_uring_disabled", or None if the kernel does not have it."""
    return next(iter(_lines(f"/proc/sys/{name}")), None)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
