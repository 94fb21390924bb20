"""Servers for the tests of remote checkpoints. A real one is started when a test first uses it."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fst
from forked import ForkedProgram
from fst_bench.http_server import Server
from fst_bench.servers.nginx import Nginx
from fst_bench.servers.program import MissingProgramError
from fst_bench.servers.s3 import S3
from objects import DATA, PATH, REQUEST
from processes import SHOW
from servers.authority import Authority
from servers.azure import Azure
from servers.gcs import Gcs
from servers.redis import Redis


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Returns a certificate authority, which signs the certificate of all servers."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name certificates of authorities, besides the system's."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides small files among requests, and makes stalls short."""
    monkeypatch.setenv("FST_REQUEST_BYTES", str(REQUEST))
    monkeypatch.setenv("FST_STALL_SECONDS", "1")


@pytest.fixture
def shown_by_loads(start_python: Callable[..., ForkedProgram], tmp_path: Path) -> Callable[..., str]:
    """Returns a function that loads URLs, the last of which fails, and returns what users see, with the log."""

    def run(*urls: str, **environ: str) -> str:
        program = start_python(SHOW, str(tmp_path / "trace"), *urls, FST_LOG="trace", **environ)
        assert program.wait() == 0, program.errors
        assert "Error" in program.output
        return program.output + program.errors

    return run


@pytest.fixture
def configure() -> Iterator[Callable[..., None]]:
    """Returns `fst.storage.configure`, and removes the options of all places after the test."""
    places = set()

    def set_options(place: str, **options: object) -> None:
        places.add(place)
        fst.storage.configure(place, **options)

    yield set_options
    for place in places:
        fst.storage.configure(place)


@pytest.fixture
def http_server() -> Iterator[Server]:
    """Returns the server that misbehaves on demand, without objects."""
    with Server() as server:
        yield server


@pytest.fixture
def server(http_server: Server) -> Server:
    """Returns the server that misbehaves on demand, with one file."""
    http_server.put(PATH, DATA)
    return http_server


@pytest.fixture
def hub_environ(http_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the server the Hugging Face Hub, whose home directory is `hub-home`, without a token."""
    monkeypatch.setenv("HF_ENDPOINT", http_server.url("").rstrip("/"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("FST_REQUEST_BYTES", str(REQUEST))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def https_server(authority: Authority) -> Iterator[Server]:
    """Returns the server that misbehaves on demand, with TLS."""
    with Server(tls=authority.server_context()) as server:
        yield server


def _session_server(kind: Callable[..., Any], *, has_tls: bool = True) -> Any:
    """Returns the fixture of a server that runs to the end of the session, also with the certificate.

    Without its program, the fixture skips the test, or fails it if FST_REQUIRE_SERVERS is 1.
    """

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Any]:
        directory = tmp_path_factory.mktemp(kind.__name__)
        try:
            started = kind(directory, authority) if has_tls else kind(directory)
        except MissingProgramError as missing:
            if os.environ.get("FST_REQUIRE_SERVERS") == "1":
                pytest.fail(f"FST_REQUIRE_SERVERS=1, but {missing}")
            pytest.skip(str(missing))
        with closing(started):
            yield started

    return server


nginx, redis, s3 = _session_server(Nginx), _session_server(Redis), _session_server(S3)
gcs, azure = _session_server(Gcs, has_tls=False), _session_server(Azure, has_tls=False)
azure_with_tokens = _session_server(Azure)
