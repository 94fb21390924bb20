"""The HTTP server that the remote tests use: it answers as HTTP demands, and misbehaves exactly as scheduled."""

import gzip
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fst_bench.http_server import CUTS, KINDS, Fault, Server, ServerProcess
from suite import CHECKOUT

DATA = bytes(range(256)) * 16
SIZE = len(DATA)
FIRST, MIDDLE, LAST = 0, SIZE // 2, SIZE - 1


@dataclass
class Answer:
    """Answer as a client sees it. `error` is what ended the body early."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    error: Exception | None


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({"dir/m": DATA}) as server:
        yield server


def get(server: Server, path: str = "dir/m", method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        return exchange(connection, path, method, **headers)
    finally:
        connection.close()


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        (f"bytes=10-{SIZE - 1}", (10, SIZE)),
        ("bytes=10-99999", (10, SIZE)),
        ("bytes=10-", (10, SIZE)),
        ("bytes=-10", (SIZE - 10, SIZE)),
    ],
)
def test_ranges(server, value, expected):
    start, stop = expected
    answer = get(server, Range=value)
    assert (answer.status, answer.body) == (206, DATA[start:stop])
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    refused = get(server, Range=f"bytes={SIZE}-{SIZE}")
    assert (refused.status, refused.headers["Content-Range"]) == (416, f"bytes */{SIZE}")


def test_conditions(server):
    version = get(server, method="HEAD").headers
    conditions = {"If_Match": version["ETag"], "If_Unmodified_Since": version["Last-Modified"]}
    for name, value in conditions.items():
        assert get(server, **{name: value}).status == 200
    assert get(server, If_None_Match=version["ETag"]).status == 304
    server.put("dir/m", DATA[::-1])
    for name, value in conditions.items():
        assert get(server, **{name: value}).status == 412
    server.put("dir/m", DATA[::-1], honours_conditions=False)
    for name, value in conditions.items():
        assert get(server, **{name: value}).body == DATA[::-1]


def test_requests_are_recorded(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    for start in (0, 8):
        exchange(connection, "dir/m?signature=x", Range=f"bytes={start}-{start + 7}", Authorization=f"Bearer {start}")
    connection.close()
    first, second = server.requests("dir/m")
    assert (first.range, second.range) == ((0, 8), (8, 16))
    assert (first.method, first.query, first.status, first.sent_bytes) == ("GET", "signature=x", 206, 8)
    assert second.headers["authorization"] == "Bearer 8"
    assert first.connection == second.connection
    counts = server.counts()
    assert (counts.requests, counts.sent_bytes, counts.connections) == (2, 16, 1)
    server.reset()
    assert server.requests() == []


@pytest.mark.parametrize("at", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("kind", ["reset", "truncate", "stall"])
def test_body_ends_at_the_byte(server, kind, at):
    server.fault("dir/m", Fault(kind, at))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=0.2 if kind == "stall" else 10)
    answer = exchange(connection, "dir/m")
    connection.close()
    expected = {"reset": ConnectionResetError, "truncate": http.client.IncompleteRead, "stall": TimeoutError}[kind]
    # read1 reports an early end as an end.
    error = answer.error or http.client.IncompleteRead(b"")
    assert isinstance(error, expected)
    assert answer.headers["Content-Length"] == str(SIZE)
    assert answer.body == DATA[:at]
    assert get(server).body == DATA
    assert server.struck("dir/m") == 1


def test_only_answers_with_the_byte_are_struck(server):
    server.fault("dir/m", Fault("status", MIDDLE, status=429, headers={"Retry-After": "7"}, after=1, times=2))
    statuses = [get(server, Range=f"bytes={at}-{at}").status for at in [FIRST, MIDDLE, MIDDLE, FIRST, MIDDLE, MIDDLE]]
    assert statuses == [206, 206, 429, 206, 429, 206]
    assert get(server, method="HEAD").status == 200


def test_faults_of_one_method(server):
    server.fault("dir/m", Fault("status", method="HEAD", status=403, times=None))
    assert [get(server, method=method).status for method in ("HEAD", "GET", "HEAD")] == [403, 200, 403]


@pytest.mark.parametrize("status", [401, 403, 404, 416, 429, 500, 503])
def test_status(server, status):
    server.fault("dir/m", Fault("status", status=status))
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    answers = [exchange(connection, "dir/m"), exchange(connection, "dir/m")]
    connection.close()
    assert [answer.status for answer in answers] == [status, 200]
    assert "ETag" not in answers[0].headers


def test_redirect_without_object(server):
    location = server.url("dir/m", host="localhost")
    server.fault("link", Fault("status", status=302, headers={"Location": location}, times=None))
    answer = get(server, "link")
    assert (answer.status, answer.headers["Location"]) == (302, f"http://localhost:{server.port}/dir/m")


def range_of(answer: Answer) -> str:
    return answer.headers["Content-Range"].removeprefix("bytes ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CUTS])
def test_each_kind_of_answer(server, kind):
    version = get(server, method="HEAD").headers
    server.fault("dir/m", Fault(kind, rate=1e6))
    answer = get(server, Range="bytes=4-11")
    stated = range_of(answer) if answer.status == 206 else ""
    honest = f"4-11/{SIZE}"
    match kind:
        case "status":
            assert answer.status == 503
        case "replace":
            assert (answer.body, stated) == (DATA[4:12], honest)
            assert answer.headers["ETag"] != version["ETag"]
        case "ignore-range" | "chunked":
            assert (answer.status, answer.body) == (200, DATA)
            assert answer.headers["Content-Length"] == (None if kind == "chunked" else str(SIZE))
        case "wrong-range":
            assert (answer.body, stated) == (DATA[5:13], f"5-12/{SIZE}")
        case "short-range":
            assert (answer.body, stated) == (DATA[4:8], f"4-7/{SIZE}")
        case "wrong-total":
            assert (answer.body, stated) == (DATA[4:12], f"4-11/{SIZE + 1}")
        case "short-body":
            assert (answer.body, stated) == (DATA[4:11], honest)
        case "long-body":
            assert (answer.body, stated) == (DATA[4:12] + b"\0", honest)
        case "overrun":
            assert (answer.body, stated) == (DATA[4:12], honest)
        case "gzip":
            assert (gzip.decompress(answer.body), stated) == (DATA[4:12], honest)
            assert answer.headers["Content-Encoding"] == "gzip"
        case "weak-etag":
            assert answer.headers["ETag"] == f"W/{version['ETag']}"
        case "no-etag":
            assert "ETag" not in answer.headers
            assert "Last-Modified" in answer.headers
        case "no-version":
            assert "ETag" not in answer.headers
            assert "Last-Modified" not in answer.headers
        case "slow":
            assert (answer.body, stated) == (DATA[4:12], honest)
        case _:
            pytest.fail(f"{kind} has no expectation")
    assert server.struck("dir/m") == 1


def test_byte_after_the_body(server):
    server.fault("dir/m", Fault("overrun"))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /dir/m HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.partition(b"\r\n\r\n")[2] == DATA + b"\0"


@pytest.mark.parametrize("honours_conditions", [True, False])
def test_replacement_in_between(server, honours_conditions):
    server.put("dir/m", DATA, honours_conditions=honours_conditions)
    server.fault("dir/m", Fault("replace", MIDDLE, data=DATA[::-1]))
    etag = get(server, Range="bytes=0-7").headers["ETag"]
    answer = get(server, Range=f"bytes={MIDDLE}-{LAST}", If_Match=etag)
    if honours_conditions:
        assert answer.status == 412
    else:
        assert (answer.status, answer.body) == (206, DATA[::-1][MIDDLE:])
    assert get(server).body == DATA[::-1]


def test_faults_on_top_of_each_other(server):
    server.fault("dir/m", Fault("weak-etag"), Fault("ignore-range"), Fault("truncate", LAST), Fault("status"))
    answer = get(server, Range="bytes=0-7")
    assert (answer.status, answer.headers["ETag"][:2], answer.body) == (200, "W/", DATA[:LAST])
    assert [get(server).status for _ in range(2)] == [503, 200]


def test_unknown_kind_of_fault():
    with pytest.raises(ValueError, match="expected one of reset, truncate, stall"):
        Fault("explode")


@pytest.mark.parametrize("settings", [{"latency": 0.05}, {"connect_latency": 0.05}, {"rate": SIZE / 0.05}], ids=str)
def test_answers_are_not_earlier_than_the_link_allows(settings):
    with Server({"m": DATA}, **settings) as server:
        start = time.monotonic()
        assert get(server, "m").body == DATA
        assert time.monotonic() - start >= 0.05


def test_slow_bytes(server):
    server.fault("dir/m", Fault("slow", MIDDLE, rate=SIZE / 2 / 0.05))
    start = time.monotonic()
    assert get(server).body == DATA
    assert time.monotonic() - start >= 0.05


def test_tls(authority, tmp_path: Path):
    with Server({"m": DATA}, tls=authority.server_context()) as server:
        server.fault("m", Fault("truncate", MIDDLE), Fault("reset", MIDDLE))
        assert server.url("m").startswith("https://")
        trusting = ssl.create_default_context(cafile=authority.certificate)
        bodies = []
        for _ in range(3):
            connection = http.client.HTTPSConnection("localhost", server.port, context=trusting, timeout=10)
            bodies.append(exchange(connection, "m").body)
            connection.close()
        assert bodies == [DATA[:MIDDLE], DATA[:MIDDLE], DATA]
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection("localhost", server.port, timeout=10).request("GET", "/m")


def test_close_ends_connections_in_their_handshake(authority):
    server = Server({"m": DATA}, tls=authority.server_context())
    closing = threading.Thread(target=server.close, daemon=True)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"\x16")  # the first byte of a handshake
        while server.counts().connections == 0:
            time.sleep(0.01)
        time.sleep(0.05)
        closing.start()
        closing.join(10)
    assert not closing.is_alive()


def test_no_byte_follows_a_body_that_was_cut(server):
    server.fault("dir/m", Fault("truncate", MIDDLE), Fault("overrun"))
    assert get(server).body == DATA[:MIDDLE]


def test_close_ends_stalled_connections(server):
    server.fault("dir/m", Fault("stall", MIDDLE))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/dir/m")
    response = connection.getresponse()
    assert response.read(MIDDLE) == DATA[:MIDDLE]
    server.drop_connections()
    assert response.read1() == b""
    connection.close()


def test_process(tmp_path: Path):
    (tmp_path / "m").write_bytes(DATA)
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT / "benches")}
    with ServerProcess(tmp_path, environ=environ, latency=0.001) as process:
        connection = http.client.HTTPConnection("127.0.0.1", process.port)
        assert exchange(connection, "m", Range="bytes=0-7").body == DATA[:8]
        connection.close()
        assert process.url("m") == f"http://127.0.0.1:{process.port}/m"
        assert process.reset().sent_bytes == 8
        assert process.counts().requests == 0
