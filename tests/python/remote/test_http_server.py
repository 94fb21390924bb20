"""The HTTP server that the remote tests use: it answers as HTTP demands, and misbehaves exactly as scheduled."""

import gzip
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from fst_bench.http_server import CUTS, KINDS, Fault, Server, ServerProcess
from suite import CHECKOUT

DATA = bytes(range(256)) * 16
SIZE = len(DATA)
MIDDLE, LAST = SIZE // 2, SIZE - 1


@dataclass
class Answer:
    """Answer as a client sees it. `error` is what ended the body early."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    error: Exception | None


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({"m": DATA}) as server:
        yield server


def connect(server: Server, timeout: float = 10) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout))


def get(server: Server, path: str = "m", method: str = "GET", **headers: str) -> Answer:
    with connect(server) as connection:
        return exchange(connection, path, method, **headers)


def exchange(connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str) -> Answer:
    connection.request(method, f"/{path}", headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body, error = bytearray(), None
    try:
        while piece := response.read1():
            body += piece
    except (http.client.IncompleteRead, ConnectionError, TimeoutError) as raised:
        error = raised
    response.close()
    return Answer(response.status, response.headers, bytes(body), error)


def test_get_and_head(server):
    whole = get(server)
    assert (whole.status, whole.body, whole.headers["Content-Length"]) == (200, DATA, str(SIZE))
    assert whole.headers["Accept-Ranges"] == "bytes"
    assert whole.headers["ETag"].startswith('"')
    head = get(server, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert dict(head.headers) == dict(whole.headers)
    assert get(server, "other").status == 404
    assert get(server, method="DELETE").status == 405


def test_ranges(server):
    for value, start in (("0-0", 0), (f"10-{LAST}", 10), ("10-99999", 10), ("10-", 10), ("-10", SIZE - 10)):
        stop = 1 if value == "0-0" else SIZE
        answer = get(server, Range=f"bytes={value}")
        assert (answer.status, answer.body) == (206, DATA[start:stop])
        assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    refused = get(server, Range=f"bytes={SIZE}-{SIZE}")
    assert (refused.status, refused.headers["Content-Range"]) == (416, f"bytes */{SIZE}")


def test_conditions(server):
    version = get(server, method="HEAD").headers
    conditions = [{"If_Match": version["ETag"]}, {"If_Unmodified_Since": version["Last-Modified"]}]
    assert [get(server, **condition).status for condition in conditions] == [200, 200]
    assert get(server, If_None_Match=version["ETag"]).status == 304
    server.put("m", DATA[::-1])
    assert [get(server, **condition).status for condition in conditions] == [412, 412]
    server.put("m", DATA[::-1], honours_conditions=False)
    assert [get(server, **condition).body for condition in conditions] == [DATA[::-1]] * 2


def test_requests_are_recorded(server):
    with connect(server) as connection:
        for start in (0, 8):
            exchange(connection, "m?signature=x", Range=f"bytes={start}-{start + 7}", Authorization=f"Bearer {start}")
    first, second = server.requests("m")
    assert (first.range, second.range) == ((0, 8), (8, 16))
    assert (first.method, first.query, first.status, first.sent_bytes) == ("GET", "signature=x", 206, 8)
    assert second.headers["authorization"] == "Bearer 8"
    assert first.connection == second.connection
    counts = server.counts()
    assert (counts.requests, counts.sent_bytes, counts.connections) == (2, 16, 1)
    server.reset()
    assert server.requests() == []


# read1 reports an early end as an end.
CUT_ERRORS = {"reset": ConnectionResetError, "truncate": type(None), "stall": TimeoutError}


@pytest.mark.parametrize("kind", CUTS)
def test_body_ends_at_the_byte(server, kind):
    for struck, at in enumerate((0, MIDDLE, LAST), 1):
        server.fault("m", Fault(kind, at))
        with connect(server, 0.1 if kind == "stall" else 10) as connection:
            answer = exchange(connection, "m")
        assert isinstance(answer.error, CUT_ERRORS[kind])
        assert answer.headers["Content-Length"] == str(SIZE)
        assert answer.body == DATA[:at]
        assert get(server).body == DATA
        assert server.struck("m") == struck


def test_only_answers_with_the_byte_are_struck(server):
    server.fault("m", Fault("status", MIDDLE, status=429, headers={"Retry-After": "7"}, after=1, times=2))
    statuses = [get(server, Range=f"bytes={at}-{at}").status for at in (0, MIDDLE, MIDDLE, 0, MIDDLE, MIDDLE)]
    assert statuses == [206, 206, 429, 206, 429, 206]
    assert get(server, method="HEAD").status == 200


def test_faults_of_one_method(server):
    server.fault("m", Fault("status", method="HEAD", status=403, times=None))
    assert [get(server, method=method).status for method in ("HEAD", "GET", "HEAD")] == [403, 200, 403]


def test_status(server):
    for status in (401, 403, 404, 416, 429, 500, 503):
        server.fault("m", Fault("status", status=status))
        with connect(server) as connection:
            answers = [exchange(connection, "m"), exchange(connection, "m")]
        assert [answer.status for answer in answers] == [status, 200]
        assert "ETag" not in answers[0].headers


def test_redirect_without_object(server):
    location = server.url("m", host="localhost")
    server.fault("link", Fault("status", status=302, headers={"Location": location}, times=None))
    answer = get(server, "link")
    assert (answer.status, answer.headers["Location"]) == (302, f"http://localhost:{server.port}/m")


# For each kind of fault, the answer to a request for the bytes from 4 to 11: its status, body and Content-Range.
HONEST = f"bytes 4-11/{SIZE}"
ANSWERS = {
    "status": (503, b"", None),
    "slow": (206, DATA[4:12], HONEST),
    "replace": (206, DATA[4:12], HONEST),
    "ignore-range": (200, DATA, None),
    "chunked": (200, DATA, None),
    "wrong-range": (206, DATA[5:13], f"bytes 5-12/{SIZE}"),
    "short-range": (206, DATA[4:8], f"bytes 4-7/{SIZE}"),
    "wrong-total": (206, DATA[4:12], f"bytes 4-11/{SIZE + 1}"),
    "short-body": (206, DATA[4:11], HONEST),
    "long-body": (206, DATA[4:12] + b"\0", HONEST),
    "overrun": (206, DATA[4:12], HONEST),
    "gzip": (206, DATA[4:12], HONEST),
    "weak-etag": (206, DATA[4:12], HONEST),
    "no-etag": (206, DATA[4:12], HONEST),
    "no-version": (206, DATA[4:12], HONEST),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CUTS])
def test_each_kind_of_answer(server, kind):
    version = get(server, method="HEAD").headers
    server.fault("m", Fault(kind, rate=1e6))
    answer = get(server, Range="bytes=4-11")
    body = gzip.decompress(answer.body) if kind == "gzip" else answer.body
    assert (answer.status, body if answer.status < 300 else b"", answer.headers["Content-Range"]) == ANSWERS[kind]
    etag = {"status": None, "no-etag": None, "no-version": None, "weak-etag": f"W/{version['ETag']}"}
    if kind == "replace":
        assert answer.headers["ETag"] != version["ETag"]
    else:
        assert answer.headers["ETag"] == etag.get(kind, version["ETag"])
    assert ("Last-Modified" in answer.headers) == (kind not in ("status", "no-version"))
    assert answer.headers["Content-Encoding"] == ("gzip" if kind == "gzip" else None)
    assert (answer.headers["Content-Length"] is None) == (kind == "chunked")
    assert server.struck("m") == 1


def test_byte_after_the_body(server):
    server.fault("m", Fault("overrun"))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /m HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.partition(b"\r\n\r\n")[2] == DATA + b"\0"
    server.fault("m", Fault("truncate", MIDDLE), Fault("overrun"))
    assert get(server).body == DATA[:MIDDLE]


@pytest.mark.parametrize("honours_conditions", [True, False])
def test_replacement_in_between(server, honours_conditions):
    server.put("m", DATA, honours_conditions=honours_conditions)
    server.fault("m", Fault("replace", MIDDLE, data=DATA[::-1]))
    etag = get(server, Range="bytes=0-7").headers["ETag"]
    answer = get(server, Range=f"bytes={MIDDLE}-{LAST}", If_Match=etag)
    if honours_conditions:
        assert answer.status == 412
    else:
        assert (answer.status, answer.body) == (206, DATA[::-1][MIDDLE:])
    assert get(server).body == DATA[::-1]


def test_faults_on_top_of_each_other(server):
    server.fault("m", Fault("weak-etag"), Fault("ignore-range"), Fault("truncate", LAST), Fault("status"))
    answer = get(server, Range="bytes=0-7")
    assert (answer.status, answer.headers["ETag"][:2], answer.body) == (200, "W/", DATA[:LAST])
    assert [get(server).status for _ in range(2)] == [503, 200]


def test_unknown_kind_of_fault():
    with pytest.raises(ValueError, match="expected one of reset, truncate, stall"):
        Fault("explode")


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


def test_tls(authority):
    with Server({"m": DATA}, tls=authority.server_context()) as server:
        server.fault("m", Fault("truncate", MIDDLE), Fault("reset", MIDDLE))
        assert server.url("m").startswith("https://")
        bodies = []
        for _ in range(3):
            context = authority.client_context()
            with closing(http.client.HTTPSConnection("localhost", server.port, context=context, timeout=10)) as client:
                bodies.append(exchange(client, "m").body)
        assert bodies == [DATA[:MIDDLE], DATA[:MIDDLE], DATA]
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection("localhost", server.port, timeout=10).request("GET", "/m")


def test_close_ends_connections_in_their_handshake(authority):
    server = Server({"m": DATA}, tls=authority.server_context())
    ending = threading.Thread(target=server.close, daemon=True)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"\x16")  # the first byte of a handshake
        while server.counts().connections == 0:
            time.sleep(0.01)
        time.sleep(0.05)
        ending.start()
        ending.join(10)
    assert not ending.is_alive()


def test_stalled_connections_end_when_they_are_dropped(server):
    server.fault("m", Fault("stall", MIDDLE))
    with connect(server) as connection:
        connection.request("GET", "/m")
        response = connection.getresponse()
        assert response.read(MIDDLE) == DATA[:MIDDLE]
        server.drop_connections()
        assert response.read1() == b""


def test_process(tmp_path: Path):
    (tmp_path / "m").write_bytes(DATA)
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT / "benches")}
    with ServerProcess(tmp_path, environ=environ, latency=0.001) as process:
        with closing(http.client.HTTPConnection("127.0.0.1", process.port)) as connection:
            assert exchange(connection, "m", Range="bytes=0-7").body == DATA[:8]
        assert process.url("m") == f"http://127.0.0.1:{process.port}/m"
        assert process.reset().sent_bytes == 8
        assert process.counts().requests == 0
