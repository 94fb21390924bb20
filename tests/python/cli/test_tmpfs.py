"""`fst tmpfs`: huge pages for files in memory."""

import errno
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst.cli import tmpfs

BLOCK = 2 << 20


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def refuse(monkeypatch):
    """Makes the kernel refuse calls for more than a block, and those for the blocks with an errno."""

    def refuse_blocks(*codes: int) -> None:
        left = list(codes)

        def madvise(_: int, length: int) -> int:
            return left.pop(0) if length == BLOCK else errno.EAGAIN

        monkeypatch.setattr(tmpfs, "_madvise", madvise)

    return refuse_blocks


def test_whole_blocks_become_huge(command, in_memory):
    path = in_memory / "model.safetensors"
    weight = torch.randn(3 * BLOCK // 4)
    save_file({"weight": weight}, path)
    done = command("tmpfs", "--huge", path)
    if "the kernel" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, f"{path}: 6.0 MiB of 6.0 MiB on huge pages\n")
    amount = re.search(r"^ShmemHugePages: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert amount is not None
    assert int(amount[1]) << 10 >= 3 * BLOCK
    assert torch.equal(fst.load_file(path)["weight"], weight)


def test_json(command, in_memory):
    path = in_memory / "small"
    path.write_bytes(b"small")
    shown = json.loads(command("tmpfs", "--huge", "--json", path).stdout)
    assert shown == {"files": [{"path": str(path), "bytes": 5, "huge_bytes": 0, "error": None}]}


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (
            (errno.ENOMEM, 0, errno.ENOMEM),
            "{}: 2.0 MiB of 6.0 MiB on huge pages; not the rest: there is no free memory",
        ),
        ((errno.EINVAL,) * 3, "fst: {}: no huge pages: .*must be Linux 6.1 or newer"),
        ((errno.EBUSY,) * 3, "fst: {}: no huge pages: .*other programs use the pages"),
        ((errno.EPERM,) * 3, "fst: {}: no huge pages: .*Oper"),
    ],
)
def test_refused_blocks(command, in_memory, refuse, codes, message):
    path = in_memory / "model"
    path.write_bytes(bytes(3 * BLOCK + 1))
    refuse(*codes)
    done = command("tmpfs", "--huge", path)
    assert done.returncode == 1
    assert re.match(message.format(path), done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/proc/version", "/proc/version: is on proc; expected a tmpfs, such as /dev/shm"),
        ("/dev/shm", "/dev/shm: is a directory; expected a regular file"),
        ("/none", "/none: No such file or directory"),
    ],
)
def test_other_files(command, path, message):
    done = command("tmpfs", "--huge", path)
    assert done.returncode == 1
    assert message in done.stderr
