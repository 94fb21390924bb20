"""Services that the benchmarks load from, each with the same files, on the loopback device."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from ..bench import plain_environment
from ..checkpoint import Checkpoint
from ..http_server import Counts, ServerProcess
from ..servers.nginx import Nginx
from ..servers.program import MissingProgramError
from ..servers.s3 import S3

LATENCY_SECONDS = 0.02
CONNECTION_RATE = 50e6  # bytes per second
COMMIT = f"{0xF57:040x}"  # of the repositories of the Hub
COMMIT_HEADER = ("X-Repo-Commit", COMMIT)
OWNER = "fst"
TITLES = {"http": "HTTP", "s3": "S3", "far": "Far HTTP"}


class Service(ABC):
    """Server with the files of checkpoints.

    `schemes` are those of the URLs that it answers, `how` describes it, `environ` is for clients, and `connections` are
    the numbers of connections with which its ceiling is measured.
    """

    schemes: tuple[str, ...]
    how: str
    environ: dict[str, str]
    connections: Sequence[int] = (2, 4, 16, 64)

    @abstractmethod
    def __init__(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        """Starts the server in a directory, whose folder `files` has the files of the checkpoints."""

    @abstractmethod
    def urls(self, scheme: str, checkpoint: Checkpoint, paths: Sequence[Path]) -> tuple[str, ...]:
        """Returns the URLs of files of a checkpoint."""

    @abstractmethod
    def plain_url(self, checkpoint: Checkpoint, path: Path) -> str:
        """Returns the address of a file for a GET without a signature."""

    @abstractmethod
    def reset(self) -> Counts | None:
        """Returns the sums over the requests since the last reset, or None if the server does not count them."""

    @abstractmethod
    def close(self) -> None:
        """Ends the server."""


class Http(Service):
    """Static server of the files, which are also repositories of a Hub whose answers are files."""

    schemes = ("http", "hf")

    def __init__(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        self._files = directory / "files"
        try:
            self._server: Nginx | ServerProcess = Nginx(directory, header=COMMIT_HEADER)
            self.endpoint = self._server.endpoint
            self.how = "nginx, one process, with sendfile"
        except MissingProgramError:
            self._server = serve(self._files)
            self.endpoint = self._server.url("").rstrip("/")
            self.how = "fst_bench.http_server, because nginx is not installed"
        self.environ = hub_environ(self.endpoint)

    def urls(self, scheme: str, checkpoint: Checkpoint, paths: Sequence[Path]) -> tuple[str, ...]:
        if scheme == "hf":
            return (f"hf://{repository(checkpoint)}",)
        return tuple(self.plain_url(checkpoint, path) for path in paths)

    def plain_url(self, checkpoint: Checkpoint, path: Path) -> str:
        return f"{self.endpoint}/{repository(checkpoint)}/resolve/{COMMIT}/{path.name}"

    def reset(self) -> Counts:
        return self._server.reset()

    def close(self) -> None:
        self._server.close()


class Far(Http):
    """The server of fst_bench, at a distance."""

    connections = (16, 64, 256)

    def __init__(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        # A new connection costs a round trip too.
        self._server = serve(
            directory / "files", latency=LATENCY_SECONDS, connect_latency=LATENCY_SECONDS, rate=CONNECTION_RATE
        )
        self.endpoint = self._server.url("").rstrip("/")
        pace = f"{LATENCY_SECONDS * 1e3:.0f} ms of latency, {CONNECTION_RATE / 1e6:.0f} MB/s a connection"
        self.how = f"fst_bench.http_server, {pace}; a new connection costs the latency too"
        self.environ = hub_environ(self.endpoint)


class SeaweedFs(Service):
    """S3 service, to which the files are uploaded."""

    schemes = ("s3",)
    how = "SeaweedFS, one process, with signatures"

    def __init__(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        self._server = S3(directory)
        self.environ = LOCAL | self._server.environ
        for checkpoint in checkpoints:
            for path in checkpoint.paths:
                self._server.put(_key(checkpoint, path), path.read_bytes())

    def urls(self, scheme: str, checkpoint: Checkpoint, paths: Sequence[Path]) -> tuple[str, ...]:
        return tuple(self._server.url(_key(checkpoint, path)) for path in paths)

    def plain_url(self, checkpoint: Checkpoint, path: Path) -> str:
        return self._server.presigned_url(_key(checkpoint, path))

    def reset(self) -> None:
        return None

    def close(self) -> None:
        self._server.close()


SERVICES: dict[str, type[Service]] = {"http": Http, "s3": SeaweedFs, "far": Far}
LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def hub_environ(endpoint: str) -> dict[str, str]:
    """Returns the environment variables with which clients use a Hub at this address."""
    return LOCAL | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def serve(files: Path, **options: object) -> ServerProcess:
    """Serves the files of a directory by the server of fst_bench."""
    return ServerProcess(files, environ=plain_environment(), header=":".join(COMMIT_HEADER), **options)


def repository(checkpoint: Checkpoint) -> str:
    """Returns the repository of a checkpoint on the Hub."""
    return f"{OWNER}/{checkpoint.workload.name}"


def lay_out(files: Path, checkpoint: Checkpoint, others: Sequence[Path] = ()) -> None:
    """Links a checkpoint's files, and others beside them, under the names of the Hub's interface.

    The list of a repository has the checkpoint's files only.
    """
    name = repository(checkpoint)
    siblings = [{"rfilename": path.name} for path in checkpoint.paths]
    tree = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": f"{number:040x}"}
        for number, path in enumerate(checkpoint.paths)
    ]
    answers = {"revision/main": {"id": name, "sha": COMMIT, "siblings": siblings}, f"tree/{COMMIT}": tree}
    for place, answer in answers.items():
        file = files / "api/models" / name / place
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(answer))
    folder = files / name / "resolve" / COMMIT
    folder.mkdir(parents=True)
    for path in (*checkpoint.paths, *others):
        (folder / path.name).symlink_to(path)


def _key(checkpoint: Checkpoint, path: Path) -> str:
    return f"{checkpoint.workload.name}/{path.name}"
