"""Servers for the tests of remote checkpoints. A real one is started when a test first uses it."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import fst
from fst_bench.http_server import Server
from fst_bench.servers.nginx import Nginx
from fst_bench.servers.s3 import S3
from objects import DATA, PATH, REQUEST
from servers.authority import Authority
from servers.azure import Azure
from servers.gcs import Gcs
from servers.missing import start
from servers.redis import Redis


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Returns a certificate authority, which signs the certificate of all servers."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name certificates of authorities, besides those of the system."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides small files among requests, and makes stalls short."""
    monkeypatch.setenv("FST_REQUEST_BYTES", str(REQUEST))
    monkeypatch.setenv("FST_STALL_SECONDS", "1")


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
def https_server(authority: Authority) -> Iterator[Server]:
    """Returns the server that misbehaves on demand, with TLS."""
    with Server(tls=authority.server_context()) as server:
        yield server


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Nginx]:
    with closing(start(Nginx, tmp_path_factory.mktemp("nginx"), authority)) as server:
        yield server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Redis]:
    with closing(start(Redis, tmp_path_factory.mktemp("redis"), authority)) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[S3]:
    with closing(start(S3, tmp_path_factory.mktemp("s3"), authority)) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    with closing(start(Gcs, tmp_path_factory.mktemp("gcs"))) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    with closing(start(Azure, tmp_path_factory.mktemp("azure"))) as server:
        yield server


@pytest.fixture(scope="session")
def azure_with_tokens(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Azure]:
    with closing(start(Azure, tmp_path_factory.mktemp("azure_with_tokens"), authority)) as server:
        yield server
