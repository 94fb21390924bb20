"""Services that the benchmarks load from, each with the same files, on the loopback device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..http_server import Counts, Server, ServerProcess
from ..servers.nginx import Nginx
from ..servers.program import MissingProgramError
from ..servers.s3 import S3

LATENCY_SECONDS = 0.02
CONNECTION_RATE = 50e6  # bytes per second
TITLES = {"http": "HTTP", "s3": "S3", "far": "Far HTTP"}
LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class Service(ABC):
    """Server with the files of a directory, which starts with the object.

    `scheme` is that of the URLs that it answers, `how` describes it, `environ` is for clients, and `connections` are
    the numbers of connections with which its ceiling is measured.
    """

    scheme = "http"
    how: str
    environ: Mapping[str, str] = LOCAL
    connections: Sequence[int] = (2, 4, 16, 64)

    @abstractmethod
    def __init__(self, files: Path) -> None:
        """Starts the server. It may use the parent directory for its own files."""

    @abstractmethod
    def url(self, name: str) -> str:
        """Returns the URL of a file."""

    def plain_url(self, name: str) -> str:
        """Returns the address of a file for a GET without a signature."""
        return self.url(name)

    @abstractmethod
    def reset(self) -> Counts | None:
        """Returns the sums over the requests since the last reset, or None if the server does not count them."""

    @abstractmethod
    def close(self) -> None:
        """Ends the server."""


class Http(Service):
    """Static server of the files."""

    def __init__(self, files: Path) -> None:
        try:
            self._server: Nginx | Server = Nginx(files.parent)
            self.how = "nginx, one process, with sendfile"
        except MissingProgramError:
            self._server = _server_process(files)
            self.how = "fst_bench.http_server, because nginx is not installed"

    def url(self, name: str) -> str:
        return self._server.url(name)

    def reset(self) -> Counts:
        return self._server.reset()

    def close(self) -> None:
        self._server.close()


class Far(Http):
    """The server of fst_bench, at a distance."""

    connections = (16, 64, 256)

    def __init__(self, files: Path) -> None:
        # A new connection costs a round trip too.
        pace = {"latency": LATENCY_SECONDS, "connect_latency": LATENCY_SECONDS, "rate": CONNECTION_RATE}
        self._server = _server_process(files, **pace)
        described = f"{LATENCY_SECONDS * 1e3:.0f} ms of latency, {CONNECTION_RATE / 1e6:.0f} MB/s a connection"
        self.how = f"fst_bench.http_server, {described}; a new connection costs the latency too"


class SeaweedFs(Service):
    """S3 service, to which the files are uploaded."""

    scheme = "s3"
    how = "SeaweedFS, one process, with signatures"

    def __init__(self, files: Path) -> None:
        self._server = S3(files.parent)
        self.environ = LOCAL | self._server.environ
        for path in files.glob("*/*"):
            self._server.put(str(path.relative_to(files)), path.read_bytes())

    def url(self, name: str) -> str:
        return self._server.url(name)

    def plain_url(self, name: str) -> str:
        return self._server.presigned_url(name)

    def reset(self) -> None:
        return None

    def close(self) -> None:
        self._server.close()


SERVICES: dict[str, type[Service]] = {"http": Http, "s3": SeaweedFs, "far": Far}


def _server_process(files: Path, **pace: float) -> Server:
    """Returns the proxy of a server of all files, in a process that ends with the proxy."""
    objects = {str(path.relative_to(files)): path for path in files.rglob("*") if path.is_file()}
    server: Server = ServerProcess().server(objects, **pace)
    return server
