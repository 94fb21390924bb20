"""The HTTP server of the tests and benchmarks: answers that loads of fst do not show."""

import http.client
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from fst_bench.http_server import Fault, Server, ServerProcess
from suite import CHECKOUT

DATA = bytes(range(256)) * 16
SIZE = len(DATA)
MIDDLE = SIZE // 2


class Answer(NamedTuple):
    """Answer as a client sees it."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({"m": DATA}) as server:
        yield server


def get(server: Server | ServerProcess, path: str = "m", method: str = "GET", **headers: str) -> Answer:
    """Requests an object. The body ends where the connection does."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request(method, f"/{path}", headers=fields)
        response = connection.getresponse()
        return Answer(response.status, response.headers, b"".join(iter(response.read1, b"")))


def test_get_head_and_conditions(server):
    whole = get(server)
    assert (whole.status, whole.body, whole.headers["Content-Length"]) == (200, DATA, str(SIZE))
    assert whole.headers["Accept-Ranges"] == "bytes"
    assert whole.headers["ETag"].startswith('"')
    head = get(server, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert dict(head.headers) == dict(whole.headers)
    assert get(server, method="DELETE").status == 405
    conditions = [{"If_Match": head.headers["ETag"]}, {"If_Unmodified_Since": head.headers["Last-Modified"]}]
    assert [get(server, **condition).status for condition in conditions] == [200, 200]
    server.put("m", DATA[::-1])
    assert [get(server, **condition).status for condition in conditions] == [412, 412]
    server.put("m", DATA[::-1], honours_conditions=False)
    assert [get(server, **condition).body for condition in conditions] == [DATA[::-1]] * 2


def test_byte_after_the_body(server):
    server.fault("m", Fault("overrun"))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /m HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b"".join(iter(lambda: client.recv(1 << 16), b"")).endswith(b"\r\n\r\n" + DATA + b"\0")


def test_answers_are_not_earlier_than_the_link_allows(server):
    def check(server: Server) -> None:
        start = time.monotonic()
        assert get(server).body == DATA
        assert time.monotonic() - start >= 0.05

    for settings in ({"latency": 0.05}, {"connect_latency": 0.05}, {"rate": SIZE / 0.05}):
        with Server({"m": DATA}, **settings) as limited:
            check(limited)
    server.fault("m", Fault("slow", MIDDLE, rate=SIZE / 2 / 0.05))
    check(server)


def test_process(tmp_path: Path):
    (tmp_path / "m").write_bytes(DATA)
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT / "benches")}
    with ServerProcess(tmp_path, environ=environ, latency=0.001) as process:
        assert get(process, Range="bytes=0-7").body == DATA[:8]
        assert process.url("m") == f"http://127.0.0.1:{process.port}/m"
        assert process.reset().sent_bytes == 8
        assert process.counts().requests == 0
