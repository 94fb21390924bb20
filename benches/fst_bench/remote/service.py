"""Services that the benchmarks load from, each with the same files, on the loopback device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..http_server import Counts, ServerProcess
from ..servers.nginx import Nginx
from ..servers.program import MissingProgramError
from ..servers.s3 import S3

LATENCY_SECONDS = 0.02
CONNECTION_RATE = 50e6  # bytes per second
TITLES = {"http": "HTTP", "s3": "S3", "far": "Far HTTP"}
LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


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
