"""The HTTP server of the tests and benchmarks: answers that loads of fst do not show."""

import http.client
import time
from contextlib import closing
from pathlib import Path

from fst_bench.http_server import Counts, Fault, Server, ServerProcess

DATA = bytes(range(256)) * 16
SIZE = len(DATA)
MIDDLE = SIZE // 2


def get(server: Server, **headers: str) -> bytes:
    """Requests the object. The body ends where the connection does."""
    with closing(http.client.HTTPConnection(server.url("").split("/")[2], timeout=10)) as connection:
        connection.request("GET", "/m", headers=headers)
        return b"".join(iter(connection.getresponse().read1, b""))


def test_answers_are_not_earlier_than_the_link_allows() -> None:
    slow = Server({"m": DATA})
    slow.fault("m", Fault("slow", MIDDLE, rate=SIZE / 2 / 0.05))
    servers = [Server({"m": DATA}, **{name: 0.05}) for name in ("latency", "connect_latency")]
    for limited in (slow, *servers, Server({"m": DATA}, rate=SIZE / 0.05)):
        with limited:
            start = time.monotonic()
            assert get(limited) == DATA
            assert time.monotonic() - start >= 0.05


def test_process(tmp_path: Path):
    (tmp_path / "m").write_bytes(DATA)
    process = ServerProcess().server({"m": tmp_path / "m"}, latency=0.001)
    assert get(process, Range="bytes=0-7") == DATA[:8]
    assert process.reset() == Counts(requests=1, sent_bytes=8, connections=1)
    assert process.counts() == Counts()
