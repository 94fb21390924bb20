"""`fst tmpfs`: puts files in memory on huge pages, which are faster to read. Needs neither PyTorch nor the library."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fst._core.files import open_regular
from fst._profile.formatting import format_size, visible
from fst.cli import machine
from fst.cli.arguments import Paths

# Number of the advice in madvise(2), which Python's mmap lacks.
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_BLOCK_BYTES = 2 << 20
# Bytes of one system call. A call asks each core for its lists of new pages, and Ctrl-C waits for it.
_CALL_BYTES = 64 * _BLOCK_BYTES
_REASONS = {
    errno.ENOMEM: "there is no free memory in blocks of 2 MiB, or the control group is at its limit",
    errno.EAGAIN: "other programs use the pages; run the command again later",
    errno.EBUSY: "other programs use the pages; run the command again later",
    errno.EINVAL: "the file has holes, or became shorter",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tmpfs",
        help="put files in /dev/shm on huge pages",
        description="Puts files of a tmpfs, such as /dev/shm, on pages of 2 MiB, so that all later loads copy them "
        "faster. A last part of less than 2 MiB stays on small pages. The data does not change, and the files may be "
        "in use. Requires Linux 6.1. The exit code is 1 if a part of a file could not be moved.",
    )
    parser.add_argument("files", nargs="+", action=Paths, metavar="FILE")
    parser.add_argument("--huge", action="store_true", required=True, help="move the files to huge pages")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    results: list[dict[str, object]] = []
    for file in arguments.files:
        length, huge_bytes, failure = _move(file)
        results.append({"path": file, "bytes": length, "huge_bytes": huge_bytes, "error": failure})
        if not arguments.json:
            rest = f"; not the rest: {failure}" if failure else ""
            print(
                visible(f"{file}: {format_size(huge_bytes)} of {format_size(length)} on huge pages{rest}"), flush=True
            )
    if arguments.json:
        print(json.dumps({"files": results}, indent=2))
    return int(any(result["error"] for result in results))


def _move(path: str) -> tuple[int, int, str | None]:
    """Moves a file to huge pages. Returns its length, the bytes on huge pages, and why others are not, or None."""
    with open_regular(path) as file:
        system = machine.file_system(Path(path))
        if system != "tmpfs":
            raise ValueError(f"{path}: is on {system or 'an unknown file system'}; expected a tmpfs, such as /dev/shm")
        length = os.fstat(file.fileno()).st_size
        whole_bytes = length // _BLOCK_BYTES * _BLOCK_BYTES
        huge_bytes, code = 0, 0
        if whole_bytes:
            with _mapping(file.fileno(), whole_bytes) as address:
                for begin in range(0, whole_bytes, _CALL_BYTES):
                    moved, failed = _collapse(address + begin, min(_CALL_BYTES, whole_bytes - begin))
                    huge_bytes, code = huge_bytes + moved, failed or code
                    if code == errno.EINVAL and huge_bytes == 0:
                        break
    reason = _REASONS.get(code, os.strerror(code)) if code else None
    if reason and huge_bytes == 0:
        raise OSError(code, f"{path}: no huge pages: {_refusal() if code == errno.EINVAL else reason}")
    return length, huge_bytes, reason


def _collapse(address: int, length: int) -> tuple[int, int]:
    """Moves pages of a mapping to huge pages. Returns the number of bytes, and the errno for the others or 0."""
    if _madvise(address, length) == 0:
        return length, 0
    # The kernel does not say which blocks have failed. It may have stopped at the first one.
    codes = [_madvise(address + begin, _BLOCK_BYTES) for begin in range(0, length, _BLOCK_BYTES)]
    return codes.count(0) * _BLOCK_BYTES, next(filter(None, codes), 0)


def _madvise(address: int, length: int) -> int:
    """Moves pages to huge pages. Returns 0 or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_COLLAPSE)
    return ctypes.get_errno() if failed else 0


@contextmanager
def _mapping(descriptor: int, length: int) -> Iterator[int]:
    """Maps a file at a multiple of 2 MiB. Nothing touches the pages, so that a file that is cut short does no harm."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]

    def map_at(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
        found = libc.mmap(address, length, protection, flags, descriptor, 0)
        if found is None or found == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {format_size(length)}: {os.strerror(code)}")
        return int(found)

    reserved_bytes = length + _BLOCK_BYTES
    # 0 is PROT_NONE.
    reserved = map_at(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        begin = -(-reserved // _BLOCK_BYTES) * _BLOCK_BYTES
        yield map_at(begin, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    finally:
        libc.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(reserved_bytes))


def _refusal() -> str:
    """Describes what the kernel needs. It has one errno for all that may be missing."""
    return (
        f"the kernel ({platform.release()}) refuses them; it must be Linux 6.1 or newer with "
        "CONFIG_TRANSPARENT_HUGEPAGE, and /sys/kernel/mm/transparent_hugepage/shmem_enabled must not be `deny`"
    )
