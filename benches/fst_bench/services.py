"""Services that remote checkpoints are loaded from, each with the same files, on the loopback device."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .ceiling import shared_rate
from .http_server import Counts, ServerProcess
from .servers.nginx import Nginx
from .servers.program import MissingProgramError
from .servers.s3 import S3

LATENCY_SECONDS = 0.02
CONNECTION_RATE = 50e6  # bytes per second
LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
BUFFER_BYTES = 256 << 10
REQUEST_BYTES_MAX = 16 << 20
REPEATS = 3


@dataclass(frozen=True)
class Service:
    """Server with the files of a directory.

    Attributes:
        server: The server, which has `url`, `close`, and `reset` if it counts requests.
        how: Description for the page.
        scheme: Beginning of the URLs that it answers.
        environ: Environment variables for clients.
        connections: Numbers of connections with which its ceiling is measured.
    """

    server: Any
    how: str
    scheme: str = "http"
    environ: Mapping[str, str] = field(default_factory=lambda: LOCAL)
    connections: Sequence[int] = (2, 4, 16, 64)

    def plain_url(self, name: str) -> str:
        """Returns the address of a file for a GET without a signature."""
        url: str = (self.server.presigned_url if self.scheme == "s3" else self.server.url)(name)
        return url

    def reset(self) -> Counts | None:
        """Returns the sums over the requests since the last reset, or None if the server does not count them."""
        return self.server.reset() if self.scheme == "http" else None


def http(files: Path) -> Service:
    """Starts a static server of the files."""
    try:
        return Service(Nginx(files.parent), "nginx, one process, with sendfile")
    except MissingProgramError:
        return Service(_server_process(files), "fst_bench.http_server, because nginx is not installed")


def far(files: Path) -> Service:
    """Starts the server of fst_bench, at a distance. A new connection costs a round trip too."""
    pace = {"latency": LATENCY_SECONDS, "connect_latency": LATENCY_SECONDS, "rate": CONNECTION_RATE}
    described = f"{LATENCY_SECONDS * 1e3:.0f} ms of latency, {CONNECTION_RATE / 1e6:.0f} MB/s a connection"
    how = f"fst_bench.http_server, {described}; a new connection costs the latency too"
    return Service(_server_process(files, **pace), how, connections=(16, 64, 256))


def s3(files: Path) -> Service:
    """Starts an S3 service, and uploads the files."""
    server = S3(files.parent)
    for path in files.glob("*/*"):
        server.put(str(path.relative_to(files)), path.read_bytes())
    return Service(server, "SeaweedFS, one process, with signatures", "s3", LOCAL | server.environ)


# Scheme of the URLs of each service, and its start. It may use the parent of the directory of the files.
SERVICES: dict[str, tuple[str, Callable[[Path], Service]]] = {
    "http": ("http", http),
    "s3": ("s3", s3),
    "far": ("http", far),
}


def _server_process(files: Path, **pace: float) -> Any:
    """Returns the proxy of a `Server` of all files, in a process that ends with the proxy."""
    objects = {str(path.relative_to(files)): path for path in files.rglob("*") if path.is_file()}
    return ServerProcess().server(objects, **pace)


def drain(url: str, size_bytes: int, connections: int, is_kept: bool = False) -> float:
    """Returns the rate at which a server sends all bytes of an object. Connections are opened before the clock.

    Each connection has a thread. Bytes are received into one buffer of the thread, which stays in the processor's
    cache, or, if `is_kept`, into memory that is new, so that the kernel clears its pages. The interpreter does no work
    for each byte: it waits in `readinto`.
    """
    parts = urlsplit(url)
    target = url.partition(parts.netloc)[2]
    request_bytes = min(REQUEST_BYTES_MAX, -(-size_bytes // connections))
    begins = iter(range(0, size_bytes, request_bytes))

    def receive(client: HTTPConnection) -> int:
        """Receives ranges that no other connection receives. Returns the number of bytes."""
        received, buffer = 0, memoryview(bytearray(BUFFER_BYTES))
        for begin in begins:
            end = min(size_bytes, begin + request_bytes)
            client.request("GET", target, headers={"Range": f"bytes={begin}-{end - 1}"})
            answer = client.getresponse()
            if answer.status != 206:
                raise RuntimeError(f"the server answered {answer.status} {answer.reason}")
            target_bytes = kept[begin:end] if kept else buffer
            while count := answer.readinto(target_bytes[:BUFFER_BYTES]):
                received += count
                if kept:
                    target_bytes = target_bytes[count:]
        return received

    kept = memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) if is_kept else None

    clients = [HTTPConnection(parts.netloc, timeout=60) for _ in range(connections)]
    try:
        for client in clients:
            client.connect()
        waiting = iter(clients)
        return shared_rate(lambda: receive(next(waiting)), size_bytes, connections)
    finally:
        for client in clients:
            client.close()


def drained(url: str, size_bytes: int, counts: Sequence[int], is_kept: bool) -> dict[str, Any]:
    """Returns the ceiling of a server: the best rate of several numbers of connections."""
    rates = {count: max(drain(url, size_bytes, count, is_kept) for _ in range(REPEATS)) for count in counts}
    count = max(rates, key=lambda count: rates[count])
    place = "into new memory" if is_kept else "and not kept"
    how = f"ranges received {place}, Python threads in readinto, best of {REPEATS}"
    return {"bytes_per_second": rates[count], "how": f"{how}; best of {counts} connections: {count}"}
