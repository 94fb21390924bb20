"""Servers for the tests of remote checkpoints."""

from collections.abc import Iterator

import pytest

from fst_bench.http_server import Server
from servers.authority import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Returns a certificate authority, which signs the certificate of all servers."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def http_server() -> Iterator[Server]:
    """Returns the server that misbehaves on demand, without objects."""
    with Server() as server:
        yield server


@pytest.fixture
def https_server(authority: Authority) -> Iterator[Server]:
    """Returns the server that misbehaves on demand, with TLS."""
    with Server(tls=authority.server_context()) as server:
        yield server
