"""Services that remote checkpoints are loaded from, each with the same files, on the loopback device."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


class Service:
    """Server with the files of a directory, which starts with the object. It may use the parent directory.

    `scheme` is that of the URLs that it answers, `how` describes it, `environ` is for clients, and `connections` are
    the numbers of connections with which its ceiling is measured.
    """

    scheme = "http"
    how: str
    environ: Mapping[str, str] = LOCAL
    connections: Sequence[int] = (2, 4, 16, 64)

    def __init__(self, server: Any) -> None:
        self._server = server

    def url(self, name: str) -> str:
        """Returns the URL of a file."""
        url: str = self._server.url(name)
        return url

    def plain_url(self, name: str) -> str:
        """Returns the address of a file for a GET without a signature."""
        return self.url(name)

    def reset(self) -> Counts | None:
        """Returns the sums over the requests since the last reset, or None if the server does not count them."""
        counts: Counts = self._server.reset()
        return counts

    def close(self) -> None:
        """Ends the server."""
        self._server.close()


class Http(Service):
    """Static server of the files."""

    def __init__(self, files: Path) -> None:
        try:
            super().__init__(Nginx(files.parent))
            self.how = "nginx, one process, with sendfile"
        except MissingProgramError:
            super().__init__(_server_process(files))
            self.how = "fst_bench.http_server, because nginx is not installed"


class Far(Service):
    """The server of fst_bench, at a distance."""

    connections = (16, 64, 256)

    def __init__(self, files: Path) -> None:
        # A new connection costs a round trip too.
        pace = {"latency": LATENCY_SECONDS, "connect_latency": LATENCY_SECONDS, "rate": CONNECTION_RATE}
        super().__init__(_server_process(files, **pace))
        described = f"{LATENCY_SECONDS * 1e3:.0f} ms of latency, {CONNECTION_RATE / 1e6:.0f} MB/s a connection"
        self.how = f"fst_bench.http_server, {described}; a new connection costs the latency too"


class SeaweedFs(Service):
    """S3 service, to which the files are uploaded."""

    scheme = "s3"
    how = "SeaweedFS, one process, with signatures"

    def __init__(self, files: Path) -> None:
        super().__init__(S3(files.parent))
        self.environ = LOCAL | self._server.environ
        for path in files.glob("*/*"):
            self._server.put(str(path.relative_to(files)), path.read_bytes())

    def plain_url(self, name: str) -> str:
        url: str = self._server.presigned_url(name)
        return url

    def reset(self) -> None:
        return None


SERVICES: dict[str, type[Http | Far | SeaweedFs]] = {"http": Http, "s3": SeaweedFs, "far": Far}


def _server_process(files: Path, **pace: float) -> Any:
    """Returns the proxy of a `Server` of all files, in a process that ends with the proxy."""
    objects = {str(path.relative_to(files)): path for path in files.rglob("*") if path.is_file()}
    return ServerProcess().server(objects, **pace)


def drain(url: str, size_bytes: int, connections: int) -> float:
    """Returns the rate at which a server sends all bytes of an object. Connections are opened before the clock.

    Bytes are received and not kept. Each connection has a thread and one buffer, which stays in the processor's cache.
    The interpreter does no work for each byte: it waits in `readinto`.
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
            while count := answer.readinto(buffer):
                received += count
        return received

    clients = [HTTPConnection(parts.netloc, timeout=60) for _ in range(connections)]
    try:
        for client in clients:
            client.connect()
        with ThreadPoolExecutor(connections) as pool:
            start = time.perf_counter()
            received = sum(pool.map(receive, clients))
            seconds = time.perf_counter() - start
    finally:
        for client in clients:
            client.close()
    if received != size_bytes:
        raise RuntimeError(f"received {received} bytes of {size_bytes}")
    return size_bytes / seconds


def drained(url: str, size_bytes: int, counts: Sequence[int]) -> dict[str, Any]:
    """Returns the ceiling of a server: the best rate of several numbers of connections."""
    rates = {count: max(drain(url, size_bytes, count) for _ in range(REPEATS)) for count in counts}
    count = max(rates, key=lambda count: rates[count])
    how = f"ranges received and not kept, Python threads in readinto, best of {REPEATS}"
    return {"bytes_per_second": rates[count], "how": f"{how}; best of {counts} connections: {count}"}
