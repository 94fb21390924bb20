"""Loads and saves under the restrictions of containers, each in a process of its own.

Tests are skipped where the machine does not permit to set up a restriction, for example to users other than root.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# Loads and saves, with each reader, and prints the readers. The file has 2 MiB, so that requests are read directly.
LOAD = """
import errno, os, sys, fst, torch
expected = torch.arange(1 << 18).view(4, -1)
def load(target):
    readers = []
    for choice in ("auto", "mmap", "pread", "uring"):
        os.environ["FST_READER"] = choice
        readers.append(torch.ops.fst.reader(["model.safetensors"]))
        loaded = fst.load_file("model.safetensors")
        assert torch.equal(loaded["a"], expected), choice
        [b] = fst.load_tensors("model.safetensors", ["b"], dtype=torch.float16)
        assert torch.equal(b, torch.ones(3, dtype=torch.float16))
        assert [name for name, _ in fst.stream("model.safetensors")] == ["a", "b"]
        fst.save_file(loaded, target + "/saved.safetensors")
        assert torch.equal(fst.load_file(target + "/saved.safetensors")["a"], expected)
    print(*readers)
"""

# Ends the program where the restriction cannot be set up.
SKIP = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def require(result, what):
    if result != 0:
        print(f"skip: {what}: {os.strerror(ctypes.get_errno())}")
        sys.exit(0)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Directory with a model, which every user may read, also as the current one."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    save_file({"a": torch.arange(1 << 18).view(4, -1), "b": torch.ones(3)}, directory / "model.safetensors")
    (directory / "model.safetensors").chmod(0o644)
    (directory / "target").mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def contained(fork_python: Callable[..., str], directory: Path) -> Callable[[str], str]:
    """Runs a program in the directory. Skips the test if the program could not set up its restriction."""

    def run(program: str, *arguments: str) -> str:
        output = fork_python(f"import os\nos.chdir({str(directory)!r})\n{SKIP}{program}", *arguments)
        if output.startswith("skip: "):
            pytest.skip(output.removeprefix("skip: ").strip())
        return output

    return run


def test_user_without_privileges(contained, directory):
    """A user who may lock no memory, and has no directory of their own."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.chown(directory / "target", 65534, 65534)
    output = contained(
        LOAD
        + """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ["HOME"] = "/nonexistent"
load("target")
try:
    fst.save_file({"a": expected}, "new.safetensors")
except PermissionError as error:
    print(error)
"""
    )
    assert "new.safetensors" in output


def test_read_only_root_without_shared_memory(contained):
    """Every mounted file system is read-only, /dev/shm is gone, and one directory is writable."""
    output = contained(
        LOAD
        + """
NEW_NAMESPACE, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 1 << 17, 1, 32, 4096, 1 << 14, 1 << 18, 2
def mount(source, target, kind, flags, what):
    require(libc.mount(source, os.fsencode(target), kind, flags, None), what)
require(libc.unshare(NEW_NAMESPACE), "a new mount namespace")
mount(None, "/", None, RECURSIVE | PRIVATE, "private mounts")
target = os.path.abspath("target")
libc.umount2(b"/dev/shm", DETACH)
for line in open("/proc/self/mounts").read().splitlines():
    # What cannot be seen below other mounts cannot be remounted.
    libc.mount(None, os.fsencode(line.split()[1]), None, REMOUNT | BIND | READ_ONLY, None)
mount(b"tmpfs", target, b"tmpfs", 0, "a writable directory")
for place in ("/", os.getcwd(), "/tmp", "/dev/shm"):
    if os.path.isdir(place) and not os.statvfs(place).f_flag & os.ST_RDONLY:
        print(f"skip: {place} is still writable")
        sys.exit(0)
load("target")
try:
    fst.save_file({"a": expected}, "new.safetensors")
except OSError as error:
    print(errno.errorcode[error.errno], error)
"""
    )
    assert "EROFS" in output
    assert "new.safetensors" in output


def test_seccomp_without_io_uring(contained):
    """The default profile of container engines refuses io_uring with EPERM."""
    output = contained(
        LOAD
        + """
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]
LOAD_WORD, JUMP_IF_LESS_OR_GREATER, RETURN, ALLOW, ERROR = 0x20, 0x35, 0x06, 0x7FFF0000, 0x00050000
# The calls of io_uring have the numbers 425 to 427 on all processors.
filter = (Instruction * 5)(
    (LOAD_WORD, 0, 0, 0),
    (JUMP_IF_LESS_OR_GREATER, 0, 2, 425),
    (JUMP_IF_LESS_OR_GREATER, 1, 0, 428),
    (RETURN, 0, 0, ERROR | errno.EPERM),
    (RETURN, 0, 0, ALLOW),
)
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
require(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
require(libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(Program(5, filter)), 0, 0), "seccomp")
assert libc.syscall(425, 1, 0) == -1 and ctypes.get_errno() == errno.EPERM
load("target")
"""
    )
    assert output.split() == ["mmap", "mmap", "pread", "pread"]
