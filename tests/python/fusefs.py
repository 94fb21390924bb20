"""FUSE file system that passes calls through to a directory, except for those that it refuses.

It speaks the kernel's protocol, without libfuse: `python fusefs.py SOURCE MOUNT fsync=EINVAL rename=EPERM`. Its process
ends after a minute at most, so that no test waits for it forever.
"""

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2
LIFETIME_S = 60
MAX_WRITE = 128 << 10
# struct fuse_in_header, and operations by their numbers. Others are refused with ENOSYS.
HEADER = struct.Struct("<IIQQIIII")
OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 13: "link",
    14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init",
    27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 35: "create", 43: "fallocate", 45: "rename",
}  # fmt: skip
FORGET, BATCH_FORGET, INTERRUPT, RENAME2 = 2, 42, 36, 45
SET_MODE, SET_OWNER, SET_SIZE = 1, 2 | 4, 8


@contextlib.contextmanager
def mounted(directory: Path, **refused: str) -> Iterator[Path]:
    """Mounts a new directory, where these calls fail with these errors. Raises OSError if this machine has no FUSE."""
    source, mount = directory / "source", directory / "mount"
    source.mkdir()
    mount.mkdir()
    rules = [f"{name}={error}" for name, error in refused.items()]
    command = [sys.executable, __file__, str(source), str(mount), *rules]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if (answer := server.stdout.readline().strip()) != "mounted":
                raise OSError(f"no FUSE: {answer}")
            yield mount
        finally:
            # Without its server, every call on the mount fails at once.
            server.kill()
            LIBC.umount2(os.fsencode(mount), MNT_DETACH)


class Server:
    """Answers the kernel's requests, one after another."""

    def __init__(self, source: str, refused: dict[str, int]) -> None:
        self.refused = refused
        self.paths = {1: source}
        self.nodes = {source: 1}
        self.files: set[int] = set()

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, MAX_WRITE + (64 << 10))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            _, number, unique, node, *_ = HEADER.unpack_from(request)
            if number in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            status, answer = 0, b""
            try:
                answer = self.answer(number, node, request[HEADER.size :])
            except OSError as error:
                status = -(error.errno or errno.EIO)
            with contextlib.suppress(OSError):
                os.write(device, struct.pack("<IiQ", 16 + len(answer), status, unique) + answer)

    def answer(self, number: int, node: int, body: bytes) -> bytes:
        name = OPERATIONS.get(number)
        if name is None:
            raise OSError(errno.ENOSYS, "")
        self.refuse(name)
        if name == "rename":
            # RENAME2 has flags after the directory.
            body = body[:8] + body[16:] if number == RENAME2 else body
        return getattr(self, name)(node, body)

    def refuse(self, name: str) -> None:
        if error := self.refused.get(name):
            raise OSError(error, "")

    def init(self, _: int, body: bytes) -> bytes:
        readahead = struct.unpack_from("<III", body)[2]
        return struct.pack("<4I2H2I2HI28x", 7, 31, readahead, 0, 0, 0, MAX_WRITE, 1, 0, 0, 0)

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.rstrip(b"\0")))

    def attributes(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        seconds, rest = zip(*(divmod(time, 10**9) for time in times), strict=True)
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return struct.pack("<6Q10I", found.st_ino, found.st_size, found.st_blocks, *seconds, *rest, *owner)

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = self.nodes.setdefault(path, max(self.paths) + 1)
        self.paths[node] = path
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(found)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body))

    def getattr(self, node: int, body: bytes) -> bytes:
        has_file, _, file = struct.unpack_from("<IIQ", body)
        found = os.fstat(file) if has_file & 1 else os.lstat(self.paths[node])
        return struct.pack("<QII", 0, 0, 0) + self.attributes(found)

    def setattr(self, node: int, body: bytes) -> bytes:
        what, _, _, size = struct.unpack_from("<IIQQ", body)
        mode, _, user, group = struct.unpack_from("<4I", body, 68)
        path = self.paths[node]
        if what & SET_SIZE:
            self.refuse("truncate")
            os.truncate(path, size)
        if what & SET_MODE:
            self.refuse("chmod")
            os.chmod(path, mode & 0o7777)
        if what & SET_OWNER:
            self.refuse("chown")
            os.chown(path, user if what & 2 else -1, group if what & 4 else -1)
        return struct.pack("<QII", 0, 0, 0) + self.attributes(os.lstat(path))

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body)
        if any(os.path.samestat(os.fstat(file), os.lstat(path)) for file in self.files):
            self.refuse("unlink_open")
        os.unlink(path)
        self.nodes.pop(path, None)
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(self.child(node, body))
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        old, new = body[8:].split(b"\0")[:2]
        source, target = self.child(node, old), self.child(struct.unpack_from("<Q", body)[0], new)
        os.rename(source, target)
        self.nodes.pop(target, None)
        if (moved := self.nodes.pop(source, None)) is not None:
            self.nodes[target], self.paths[moved] = moved, target
        return b""

    def link(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.link(self.paths[struct.unpack_from("<Q", body)[0]], path)
        return self.entry(path)

    def open_file(self, path: str, flags: int, mode: int = 0o666) -> bytes:
        if flags & os.O_DIRECT:
            self.refuse("direct")
        flags = flags & ~(os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW)
        file = os.open(path, flags, mode)
        self.files.add(file)
        return struct.pack("<QII", file, 0, 0)

    def open(self, node: int, body: bytes) -> bytes:
        return self.open_file(self.paths[node], struct.unpack_from("<I", body)[0])

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("<3I", body)
        path = self.child(node, body[16:])
        opened = self.open_file(path, flags | os.O_CREAT, mode & ~umask)
        return self.entry(path) + opened

    def read(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(file, size, offset)

    def write(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(file, body[40 : 40 + size], offset), 0)

    def statfs(self, _: int, __: bytes) -> bytes:
        return struct.pack("<5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0)

    def release(self, _: int, body: bytes) -> bytes:
        (file,) = struct.unpack_from("<Q", body)
        self.files.discard(file)
        os.close(file)
        return b""

    def fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def fallocate(self, _: int, body: bytes) -> bytes:
        file, offset, length, mode = struct.unpack_from("<3QI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        os.posix_fallocate(file, offset, length)
        return b""

    def nothing(self, _: int, __: bytes) -> bytes:
        return b""

    flush = releasedir = fsyncdir = nothing

    def opendir(self, _: int, __: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for index, name in enumerate(sorted(os.listdir(self.paths[node]))[offset:], offset + 1):
            encoded = os.fsencode(name)
            record = struct.pack("<QQII", index, index, len(encoded), 0) + encoded
            record += bytes(-len(record) % 8)
            if len(answer) + len(record) > size:
                break
            answer += record
        return answer


def main(source: str, mount: str, *rules: str) -> None:
    signal.alarm(LIFETIME_S)
    refused = {name: getattr(errno, error) for name, error in (rule.split("=") for rule in rules)}
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if LIBC.mount(b"fst-test", os.fsencode(mount), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")
    except OSError as error:
        print(error, flush=True)
        return
    print("mounted", flush=True)
    Server(source, refused).serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
