"""The HTTP server of the tests and benchmarks: answers that loads of fst do not show."""

import http.client
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from fst_bench.http_server import Counts, Fault, Server, ServerProcess

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


def get(server: Server, method: str = "GET", **headers: str) -> Answer:
    """Requests the object. The body ends where the connection does."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(server.url("").split("/")[2], timeout=10)) as connection:
        connection.request(method, "/m", headers=fields)
        response = connection.getresponse()
        return Answer(response.status, response.headers, b"".join(iter(response.read1, b"")))


def test_get_head_and_conditions(server):
    whole, head = get(server), get(server, "HEAD")
    assert (whole.status, whole.body, whole.headers["Content-Length"]) == (200, DATA, str(SIZE))
    assert (head.status, head.body, dict(head.headers)) == (200, b"", dict(whole.headers))
    conditions = [{"If_Match": head.headers["ETag"]}, {"If_Unmodified_Since": head.headers["Last-Modified"]}]
    assert [get(server, **condition).status for condition in conditions] == [200, 200]
    server.put("m", DATA[::-1])
    assert [get(server, **condition).status for condition in conditions] == [412, 412]
    server.put("m", DATA[::-1], honours_conditions=False)
    assert [get(server, **condition).body for condition in conditions] == [DATA[::-1]] * 2


def test_answers_are_not_earlier_than_the_link_allows(server):
    servers = [Server({"m": DATA}, **{name: 0.05}) for name in ("latency", "connect_latency")]
    server.fault("m", Fault("slow", MIDDLE, rate=SIZE / 2 / 0.05))
    for limited in (server, *servers, Server({"m": DATA}, rate=SIZE / 0.05)):
        with limited:
            start = time.monotonic()
            assert get(limited).body == DATA
            assert time.monotonic() - start >= 0.05


def test_process(tmp_path: Path):
    (tmp_path / "m").write_bytes(DATA)
    process = ServerProcess().server({"m": tmp_path / "m"}, latency=0.001)
    assert get(process, Range="bytes=0-7").body == DATA[:8]
    assert process.reset() == Counts(requests=1, sent_bytes=8, connections=1)
    assert process.counts() == Counts()
